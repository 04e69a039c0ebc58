"""Recipes that fine-tune a model on a task, or train one on it from random weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Gt, Le, Len

from qkv.recipe.base import PAIRS_ONLY, BaseRecipe, TokenizerSection
from qkv.recipe.data_options import check_reader_options, reader_options_of
from qkv.recipe.fields import STRICT, Dimension, Fraction, NonNegativeFloat, PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """The section `data` of a task: examples and splits."""

    format: str
    """File format of the examples, such as csv, jsonl, conll, squad, glue:MNLI, images; see docs/data.md."""
    train: str | list[str]
    """Training file, files, or folder of splits."""
    valid: str | list[str] | None = None
    """Validation file; by default the format's validation split if `train` is a folder of splits."""
    test: str | list[str] | None = None
    """Test file; by default the format's test split if `train` is a folder of splits."""
    hold_out: dict[Literal["valid", "test"], Fraction] = field(default_factory=dict)
    """Fractions of `train` that are held out, chosen as `split_by` says."""
    split_by: Literal["content", "position"] = "content"
    """How examples are held out: by a hash of their content, or the last ones of the files, valid before test."""
    group_by: str | None = None
    """Field whose equal values stay in one split, such as title or group; for questions, by default their context."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Names of the columns (text, text_pair, label, …) and other options of the reader."""
    delimiter: str | None = None
    """Character between the fields of a table, or `tab`; by default detected, and then saved with the run."""
    encoding: str | None = None
    """Encoding of text files, such as utf-8, latin-1 or cp1252; by default detected, and then saved with the run."""
    skip_bad: bool = False
    """Skip examples that cannot be read, and list them."""
    fold: Annotated[list[PositiveInt], Len(2, 2)] | None = None
    """[k, n]: hold out fold k of n for validation."""
    __pydantic_config__ = STRICT

    @property
    def reader_options(self) -> dict[str, Any]:
        """The options of the format's reader: columns, delimiter and encoding."""
        return reader_options_of(self.columns, self.delimiter, self.encoding)

    def __post_init__(self) -> None:
        check_reader_options(self.columns, self.delimiter, self.encoding)
        if self.split_by == "position" and (self.fold is not None or self.group_by is not None):
            raise ValueError("split_by: position goes with hold_out only; remove fold and group_by")
        if self.fold is None:
            return
        if self.fold[0] > self.fold[1] or self.fold[1] < 2:
            raise ValueError(f"fold is [k, n] with 1 <= k <= n and n >= 2, such as [1, 5], not {self.fold}")
        if self.valid is not None or "valid" in self.hold_out:
            raise ValueError("a fold is the validation split; remove data.valid and data.hold_out.valid")


@dataclass(frozen=True, kw_only=True)
class LoraSection:
    """LoRA: low-rank updates of frozen matrices (Hu et al. 2022)."""

    rank: Dimension = 8
    """Rank of the update matrices A and B."""
    alpha: PositiveFloat = 16.0
    """The update is scaled by alpha / rank."""
    dropout: Fraction = 0.0
    """Dropout of the input of the update."""
    target_modules: list[Literal["q", "k", "v", "o", "up", "gate", "down"]] = field(default_factory=lambda: ["q", "v"])
    """Matrices that get an update: q, k, v, o of attention; up, gate, down of the feed-forward network."""
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """The section `finetune`: which parameters are trained, and with which weights."""

    trainable: Literal["all", "head"] | None = None
    """`head` freezes the backbone, `all` does not; by default it is frozen if feature_layers or lora is set."""
    feature_layers: Literal["last", "concat_last_4", "scalar_mix"] | None = None
    """Layers of the backbone that the head reads: the last, the last four concatenated, or a learned mean of all."""
    pooling: Literal["first", "last", "mean", "concat", "final", "attention"] | None = None
    """Vector of a text that the head reads: of its first or last token, `mean`, `attention`: a learned weighted mean,
    `concat`: [last, maximum, mean], or `final`: the last states of both directions of a recurrent encoder."""
    lora: LoraSection | None = None
    """Train LoRA matrices in the frozen backbone, and the head."""
    layerwise_lr_decay: Annotated[float, Gt(0), Le(1)] = 1.0
    """Learning rate of a layer relative to the layer above it."""
    head_lr_factor: PositiveFloat = 1.0
    """Learning rate of the newly initialized head relative to that of the backbone's last layer."""
    unfreeze_epochs: PositiveFloat | None = None
    """Train the head first, then one more layer every so many epochs (gradual unfreezing); by default all at once."""
    class_weights: Literal["none", "balanced"] = "none"
    """`balanced` weights the loss of each class by its inverse frequency."""
    lm_loss_weight: NonNegativeFloat = 0.0
    """Weight of an auxiliary language-modeling loss for decoders (0.5 in Radford et al. 2018)."""
    __pydantic_config__ = STRICT

    @property
    def backbone_frozen(self) -> bool:
        """True if the pretrained weights of the backbone are not updated."""
        if self.trainable is not None:
            return self.trainable == "head"
        return self.feature_layers is not None or self.lora is not None

    def __post_init__(self) -> None:
        if self.lora is not None and self.feature_layers is not None:
            raise ValueError("lora and feature_layers exclude each other; remove one of them")
        if self.lora is not None and self.trainable == "all":
            raise ValueError("lora freezes the backbone, and trainable: all trains it; remove one of them")
        if self.lora is not None and self.trainable == "head":
            raise ValueError(
                "lora trains matrices of the backbone, and trainable: head only the head; remove one of them"
            )
        if self.backbone_frozen and self.lora is None and self.layerwise_lr_decay != 1:
            raise ValueError("layerwise_lr_decay needs trained layers, and only the head is trained; remove it")
        if self.backbone_frozen and self.unfreeze_epochs is not None:
            raise ValueError("unfreeze_epochs trains the layers of the backbone, which is frozen; remove it")


@dataclass(frozen=True, kw_only=True)
class FinetuneValidation:
    """The section `validation` of a task."""

    every_steps: PositiveInt | None = None
    """Steps between validations; by default after each epoch, with `keep: last` at most about ten times in a run."""
    patience: PositiveInt | None = None
    """Stop after this many validations without improvement."""
    keep: Literal["best", "last"] = "best"
    """Weights that the run ends with: those of the best validation, or those of the last step."""
    metric: str | None = None
    """Metric that selects the best checkpoint; by default the task's primary metric."""
    max_examples: PositiveInt | None = None
    """Maximum number of validation examples; by default all."""
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        if self.keep == "last" and self.patience is not None:
            raise ValueError(
                "patience stops a run after its best weights, and keep: last drops them; remove one of them"
            )


@dataclass(frozen=True, kw_only=True)
class FinetuneRecipe(BaseRecipe):
    """A recipe with `task`: a model with the task's head is trained on labeled examples."""

    key = "task"
    unsupported_train_keys: ClassVar[dict[str, str]] = PAIRS_ONLY
    trains_few_embeddings = True

    task: dict[str, Any]
    """The task's `name` and its settings; a bare name takes the defaults."""
    data: TaskData
    """The labeled examples."""
    tokenizer: TokenizerSection = field(default_factory=TokenizerSection)
    """The tokenizer of a model that is trained from random weights; omitted with model.init_from."""
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    """Which parameters are trained."""
    validation: FinetuneValidation = field(default_factory=FinetuneValidation)
    """When and how the model is validated."""

    @property
    def layerwise_lr_decay(self) -> float:
        """Learning rate of a layer relative to the layer above it."""
        return self.finetune.layerwise_lr_decay

    @property
    def unfreeze_epochs(self) -> float | None:
        """Epochs after which one more layer is trained."""
        return self.finetune.unfreeze_epochs

    @property
    def head_lr_factor(self) -> float:
        """Learning rate of the head relative to that of the backbone's last layer."""
        return self.finetune.head_lr_factor

    @property
    def keeps_last_weights(self) -> bool:
        """Whether the run ends with the weights of its last step."""
        return self.validation.keep == "last"
