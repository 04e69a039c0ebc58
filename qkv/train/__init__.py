"""Train a model described by a recipe."""
