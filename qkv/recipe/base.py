"""Keys and sections that all recipes have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from qkv.recipe.fields import STRICT, PositiveInt, Seed, VocabSize
from qkv.recipe.training import TrainConfig

# keys of `train` that only recipes of pairs may set
PAIRS_ONLY = dict.fromkeys(("scheduled_sampling", "rdrop_alpha"), "goes with pairs; leave it out")


@dataclass(frozen=True, kw_only=True)
class BaseRecipe:
    """Keys of every recipe. A subclass is the schema of one workload (`qkv.train.workload.WORKLOADS`)."""

    key: ClassVar[str]
    """Top-level key that only recipes of this class have, the name of their workload; "" for pairs."""
    unsupported_train_keys: ClassVar[dict[str, str]] = {}
    """Keys of `train` that these recipes must not set, each with the end of the error message."""
    trains_few_embeddings: ClassVar[bool] = False
    """Whether training data usually contains a small part of the vocabulary, which `perf.lazy_adamw` makes use of."""

    name: str
    """Name of the run; by default the file's name. The run is written to runs/NAME unless `-o` is given."""
    model: dict[str, Any]
    """The model: `family`, `size`, `embeddings` (word vectors) and any field of the family's Config, or `init_from`."""
    train: TrainConfig
    """Optimization settings."""
    seed: Seed = 1
    """Seed of initialization, data order, dropout and noise."""
    imports: list[str] = field(default_factory=list)
    """Python modules to import first, which register families, objectives, tasks and so on."""
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        for name, message in self.unsupported_train_keys.items():
            if getattr(self.train, name):
                raise ValueError(f"train.{name}: {message}")

    @property
    def has_tokenizer_section(self) -> bool:
        """Whether the recipe configures a tokenizer, which a pretrained model does not need."""
        return getattr(self, "tokenizer", None) not in (None, TokenizerSection())

    @property
    def head_lr_factor(self) -> float:
        """Learning rate of the head relative to that of the backbone's last layer."""
        return 1.0

    @property
    def keeps_last_weights(self) -> bool:
        """Whether the run ends with the weights of its last step instead of those of the best validation."""
        return False

    @property
    def layerwise_lr_decay(self) -> float:
        """Learning rate of a layer relative to the layer above it."""
        return 1.0

    @property
    def unfreeze_epochs(self) -> float | None:
        """Epochs after which one more layer is trained; None: all layers are trained from the start."""
        return None


@dataclass(frozen=True, kw_only=True)
class TokenizerSection:
    """The tokenizer of a model of text: an existing one, or one trained on the training data as its family does."""

    path: str | None = None
    """An existing tokenizer: its file or folder, or a model that has one."""
    kind: Literal["word", "character"] | None = None
    """`word` trains a vocabulary of whole words, `character` of characters; by default one of the family's kind."""
    vocab_size: VocabSize | None = None
    """Vocabulary size of a tokenizer that is trained; of whole words, the largest one."""
    min_count: PositiveInt | None = None
    """Words that occur less often in the training data are unknown; for a vocabulary of whole words."""
    lowercase: bool | None = None
    """Whether text is lower-cased; by default as the family does."""
    __pydantic_config__ = STRICT
