"""Recipes that pretrain on documents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from qkv.recipe.base import PAIRS_ONLY, BaseRecipe, TokenizerSection
from qkv.recipe.fields import STRICT, Fraction, PositiveInt, SampleCount, SequenceLength
from qkv.recipe.objectives import ObjectiveConfig


@dataclass(frozen=True, kw_only=True)
class CorpusData:
    """The section `data` of pretraining: documents, and how they are split into chunks."""

    train: str | list[str]
    """Training documents: files, folders, datasets:NAME, python:topics, or the output of `qkv data build`."""
    valid: str | list[str] | None = None
    """Validation documents."""
    hold_out: Fraction = 0.0
    """Fraction of the training documents that is held out for validation if `valid` is not set."""
    split_by: Literal["content", "position"] = "content"
    """How text is held out: whole documents by a hash of their text, or the end of the text, also of one document."""
    format: Literal["line_per_document", "blank_line_separated", "file_per_document", "jsonl", "parquet"] | None = None
    """File format; by default inferred from the file name's extension."""
    text_field: str = "text"
    """Field of the text in jsonl, parquet and Hugging Face datasets."""
    streaming: bool = False
    """Read and tokenize documents during training instead of before."""
    chunking: Literal["even", "greedy", "sentences", "packed"] | None = None
    """How documents become chunks: of nearly equal or maximum length, whole sentences, or packed across documents."""
    max_length: SequenceLength | None = None
    """Maximum tokens of a chunk, special tokens included; by default the model's maximum."""
    carry_memory: bool | None = None
    """Read documents as streams, in segments of `max_length`, and carry the memory; by default if the model has one."""
    num_streams: PositiveInt | None = None
    """Texts that are read side by side with memory; by default `train.batch_size`, or batch_tokens / max_length."""
    random_bptt: bool = False
    """Draw the length of each step's segments around `max_length`, and scale the learning rate by it (AWD-LSTM)."""
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        streams = [name for name in ("num_streams", "random_bptt") if getattr(self, name)]
        if self.carry_memory is False and streams:
            raise ValueError(f"{streams[0]} is for models that carry memory; remove it, or carry_memory: false")
        if self.random_bptt and self.max_length is None:
            raise ValueError("random_bptt needs max_length, the mean length of a segment, such as 70")


@dataclass(frozen=True, kw_only=True)
class PretrainingValidation:
    """The section `validation` of pretraining: perplexity of held-out text."""

    default_every_steps: ClassVar[int | None] = 1000
    every_steps: PositiveInt | None = None
    """Steps between validations; by default 1,000, or once per epoch if `train.epochs` is set."""
    patience: PositiveInt | None = None
    """Stop after this many validations without improvement."""
    keep: Literal["best", "last"] = "best"
    """Weights that the run ends with: those of the best validation, or those of the last step."""
    max_tokens: PositiveInt = 200_000
    """Maximum number of held-out tokens that are scored."""
    num_samples: SampleCount = 2
    """Number of held-out texts that are printed with the model's continuation, filled masks or reconstruction."""
    num_streams: PositiveInt | None = None
    """Streams that held-out text is cut into for a model with memory: 1 is exact; by default as in training."""
    memory_length: PositiveInt | None = None
    """Tokens of the memory of Transformer-XL or XLNet on held-out text; by default as in training (`model`)."""
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class PretrainingRecipe(BaseRecipe):
    """A recipe with `objective`: a model is pretrained on documents."""

    key = "objective"
    unsupported_train_keys: ClassVar[dict[str, str]] = PAIRS_ONLY

    data: CorpusData
    """The documents."""
    objective: dict[str, ObjectiveConfig]
    """Objectives by name, each with its settings; a bare name takes the paper's settings."""
    tokenizer: TokenizerSection = field(default_factory=TokenizerSection)
    """The tokenizer; omitted with model.init_from."""
    validation: PretrainingValidation = field(default_factory=PretrainingValidation)
    """When and how the model is validated."""

    @property
    def keeps_last_weights(self) -> bool:
        """Whether the run ends with the weights of its last step."""
        return self.validation.keep == "last"
