"""The recipe section `objective`: one config class per objective, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qkv.data.noise.config import DenoisingConfig, MLMConfig, PLMConfig, SpanCorruptionConfig
from qkv.recipe.fields import STRICT, FiniteFloat, NonNegativeFloat, PositiveInt, WindowSize
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

    activation_penalty: NonNegativeFloat = 0.0
    """Weight of the mean square of the last layer's hidden states, for recurrent models (AR; Merity et al. 2018)."""
    temporal_penalty: NonNegativeFloat = 0.0
    """Weight of the mean square of their change from token to token, for recurrent models (TAR; Merity et al. 2018)."""


@dataclass(frozen=True, kw_only=True)
class MLMObjective(ObjectiveConfig, MLMConfig):
    """Masked language modeling, with or without next-sentence prediction (Devlin et al. 2019)."""

    next_sentence: bool = False
    """Train on pairs of segments and predict whether the second follows the first."""


@dataclass(frozen=True, kw_only=True)
class PLMObjective(ObjectiveConfig, PLMConfig):
    """Permutation language modeling: predict tokens in a random order of factorization (Yang et al. 2019)."""


@dataclass(frozen=True, kw_only=True)
class BiLMObjective(ObjectiveConfig):
    """Bidirectional language modeling: predict the next word and the previous one, for ELMo (Peters et al. 2018)."""


@dataclass(frozen=True, kw_only=True)
class DenoisingObjective(ObjectiveConfig, DenoisingConfig):
    """Denoising: reconstruct a text from a corrupted copy (Lewis et al. 2020)."""


@dataclass(frozen=True, kw_only=True)
class SpanCorruptionObjective(ObjectiveConfig, SpanCorruptionConfig):
    """Span corruption: predict the masked spans of a text (Raffel et al. 2020)."""


@dataclass(frozen=True, kw_only=True)
class SkipGramObjective(ObjectiveConfig):
    """Skip-gram with negative sampling: predict the words around a word, for word vectors (Mikolov et al. 2013)."""

    window: WindowSize = 5
    """Largest distance between a word and its context; the distance is drawn for each word, from 1 up to this."""
    negatives: PositiveInt = 5
    """Noise words per pair of words, drawn by their frequency to the power of `noise_exponent`."""
    noise_exponent: FiniteFloat = 0.75
    """Power of the frequencies by which noise words are drawn."""
    subsample: NonNegativeFloat = 1e-3
    """Frequency above which occurrences of a word are dropped at random (Mikolov et al. 2013b, 2.3); 0: none are."""


@dataclass(frozen=True, kw_only=True)
class CBOWObjective(SkipGramObjective):
    """Continuous bag of words with negative sampling: predict a word from the mean of the words around it."""

    gradient: Literal["corrected", "original"] = "corrected"
    """`original` does not divide a context word's gradient by their number, as word2vec.c (Irsoy et al. 2021)."""


# Registering an objective (`qkv.objectives.registry.OBJECTIVES`) adds its config class here: recipes are validated
# without the objectives themselves, which need torch.
OBJECTIVE_CONFIGS: Registry[type[ObjectiveConfig]] = Registry(
    "objective",
    {
        "clm": "qkv.recipe.objectives:CLMObjective",
        "mlm": "qkv.recipe.objectives:MLMObjective",
        "plm": "qkv.recipe.objectives:PLMObjective",
        "bilm": "qkv.recipe.objectives:BiLMObjective",
        "denoising": "qkv.recipe.objectives:DenoisingObjective",
        "span_corruption": "qkv.recipe.objectives:SpanCorruptionObjective",
        "skipgram": "qkv.recipe.objectives:SkipGramObjective",
        "cbow": "qkv.recipe.objectives:CBOWObjective",
    },
)
