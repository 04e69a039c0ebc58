"""Recipes: schema and parsing. Imports no torch."""

from qkv.recipe.parse import RECIPE_FILE, read_recipe, read_run_recipe
from qkv.recipe.schema import Recipe

__all__ = ["RECIPE_FILE", "Recipe", "read_recipe", "read_run_recipe"]
