"""From a recipe to a trained model."""

from qkv.recipe.parse import read_recipe
from qkv.recipe.schema import BaseRecipe
from qkv.train.run_log import Record
from qkv.train.trainer import fit

__all__ = ["BaseRecipe", "Record", "fit", "read_recipe"]
