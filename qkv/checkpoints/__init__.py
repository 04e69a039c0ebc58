"""Model folders: load and save models with their tokenizers, in our format or in Hugging Face's."""

from qkv.checkpoints.bundle import BundleOutput, ModelBundle
from qkv.checkpoints.model_folder import load, save

__all__ = ["BundleOutput", "ModelBundle", "load", "save"]
