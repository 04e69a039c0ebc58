"""The schema of recipes: one dataclass per section, one recipe class per workload.

A recipe with `objective` pretrains on documents, one with `task` is trained on labeled examples, one with neither
learns from pairs.
"""

from __future__ import annotations

from collections.abc import Collection

from qkv.recipe.base import BaseRecipe, TokenizerSection
from qkv.recipe.finetuning import FinetuneConfig, FinetuneRecipe, FinetuneValidation, LoraSection, TaskData
from qkv.recipe.objectives import ObjectiveConfig
from qkv.recipe.pretraining import CorpusData, PretrainingRecipe, PretrainingValidation
from qkv.recipe.seq2seq import (
    PairData,
    PairDataset,
    Seq2SeqRecipe,
    Seq2SeqValidation,
    SideTokenizer,
    SideTokenizers,
    TestConfig,
)
from qkv.recipe.training import TrainConfig

__all__ = [
    "BaseRecipe",
    "CorpusData",
    "FinetuneConfig",
    "FinetuneRecipe",
    "FinetuneValidation",
    "LoraSection",
    "ObjectiveConfig",
    "PairData",
    "PairDataset",
    "PretrainingRecipe",
    "PretrainingValidation",
    "Recipe",
    "Seq2SeqRecipe",
    "Seq2SeqValidation",
    "SideTokenizer",
    "SideTokenizers",
    "TaskData",
    "TestConfig",
    "TokenizerSection",
    "TrainConfig",
    "recipe_class",
]

Recipe = Seq2SeqRecipe | PretrainingRecipe | FinetuneRecipe
# by the key that decides a recipe's workload; "" for a recipe that has none of the others
RECIPE_CLASSES: dict[str, type[BaseRecipe]] = {
    recipe_type.key: recipe_type for recipe_type in (PretrainingRecipe, FinetuneRecipe, Seq2SeqRecipe)
}


def recipe_class(keys: Collection[str]) -> type[BaseRecipe]:
    """Return the recipe class that a recipe with these top-level keys belongs to."""
    return RECIPE_CLASSES[next((key for key in RECIPE_CLASSES if key in keys), "")]
