"""From a recipe to a trained model."""

from qkv.train.fit import fit
from qkv.train.recipe import read_recipe
from qkv.train.sections import Recipe
from qkv.train.tally import Record

__all__ = ["Recipe", "Record", "fit", "read_recipe"]
