"""Recipes: schema and parsing. Imports no torch."""

from qkv.recipe.parse import read_recipe, read_run_recipe
from qkv.recipe.schema import Recipe

__all__ = ["Recipe", "read_recipe", "read_run_recipe"]
