"""From a recipe to a trained model."""

from qkv.train.fit import Record, fit
from qkv.train.recipe import Recipe, read_recipe

__all__ = ["Recipe", "Record", "fit", "read_recipe"]
