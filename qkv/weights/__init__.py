"""Weights as files, and models as folders."""

from qkv.weights.folder import Loaded, load, save

__all__ = ["Loaded", "load", "save"]
