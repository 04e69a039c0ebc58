"""The recipe section `objective`: one config class per objective, by name."""

from __future__ import annotations

from dataclasses import dataclass

from qkv.data.noise.config import DenoisingConfig, MLMConfig, SpanCorruptionConfig
from qkv.recipe.fields import STRICT, NonNegativeFloat
from qkv.registry import Registry


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Settings that every objective has; the config class of a registered objective derives from it."""

    weight: NonNegativeFloat = 1.0
    """How often this objective is drawn in relation to the others, if the recipe has several."""
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class CLMObjective(ObjectiveConfig):
    """Causal language modeling: predict the next token (Radford et al. 2018)."""


@dataclass(frozen=True, kw_only=True)
class MLMObjective(ObjectiveConfig, MLMConfig):
    """Masked language modeling, with or without next-sentence prediction (Devlin et al. 2019)."""

    next_sentence: bool = False
    """Train on pairs of segments and predict whether the second follows the first."""


@dataclass(frozen=True, kw_only=True)
class DenoisingObjective(ObjectiveConfig, DenoisingConfig):
    """Denoising: reconstruct a text from a corrupted copy (Lewis et al. 2020)."""


@dataclass(frozen=True, kw_only=True)
class SpanCorruptionObjective(ObjectiveConfig, SpanCorruptionConfig):
    """Span corruption: predict the masked spans of a text (Raffel et al. 2020)."""


# Registering an objective (`qkv.objectives.registry.OBJECTIVES`) adds its config class here: recipes are validated
# without the objectives themselves, which need torch.
OBJECTIVE_CONFIGS: Registry[type[ObjectiveConfig]] = Registry(
    "objective",
    {
        "clm": "qkv.recipe.objectives:CLMObjective",
        "mlm": "qkv.recipe.objectives:MLMObjective",
        "denoising": "qkv.recipe.objectives:DenoisingObjective",
        "span_corruption": "qkv.recipe.objectives:SpanCorruptionObjective",
    },
)
