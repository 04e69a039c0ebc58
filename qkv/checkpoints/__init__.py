"""Weights as files, and models as folders."""

from qkv.checkpoints.model_folder import ModelBundle, load, save

__all__ = ["ModelBundle", "load", "save"]
