"""The weights of a run that has not finished: the best so far, or those of its last checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path

from torch import Tensor

from qkv.checkpoints.safetensors_io import load_tensors
from qkv.errors import InputError

LAST_CHECKPOINT, BEST_WEIGHTS = "last.safetensors", "best.safetensors"
SHARDED_LAST_CHECKPOINT = "last.json"  # names the checkpoint folder of a sharded model


def has_checkpoint(folder: Path) -> bool:
    """Return whether a folder has a checkpoint to resume from."""
    return (folder / LAST_CHECKPOINT).is_file() or (folder / SHARDED_LAST_CHECKPOINT).is_file()


def read_unfinished_weights(folder: Path) -> tuple[Path, dict[str, Tensor]] | None:
    """Return the weights of an unfinished run and their file, with a warning; None if the folder holds no such run."""
    path = folder / BEST_WEIGHTS
    if path.is_file():
        tensors, metadata = load_tensors(path)
        origin = f", of step {metadata['step'][:20]}" if "step" in metadata else ""
        warnings.warn(f"{folder}: training has not finished; using its best weights so far{origin}", stacklevel=2)
        return path, tensors
    path = folder / LAST_CHECKPOINT
    if path.is_file():
        tensors, _ = load_tensors(path)
        prefix = "ema." if any(name.startswith("ema.") for name in tensors) else "model."
        message = "training has not finished, nor was it validated; using the weights of its last checkpoint"
        warnings.warn(f"{folder}: {message}", stacklevel=2)
        return path, {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    if (folder / SHARDED_LAST_CHECKPOINT).is_file():
        message = "training has not finished, and there are no best weights yet"
        raise InputError(f"{folder}: {message}; run the same qkv train again to resume it")
    return None
