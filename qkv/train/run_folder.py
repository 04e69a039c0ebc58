"""Ownership of a run folder: it holds runs of one recipe, and one process trains in it at a time."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qkv.checkpoints.model_folder import is_finished
from qkv.errors import InputError
from qkv.recipe.parse import RECIPE_FILE, read_run_recipe
from qkv.recipe.schema import Recipe
from qkv.train.checkpoint import has_checkpoint


def check_same_recipe(folder: Path, recipe: Recipe) -> None:
    """Refuse a folder with a run of another recipe, before anything is written."""
    path = folder / RECIPE_FILE
    if not path.is_file() or not (has_checkpoint(folder) or is_finished(folder)):
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder}: is a file; choose another output folder")
        return
    previous, current = _flatten(asdict(read_run_recipe(path))), _flatten(asdict(recipe))
    for key in sorted(previous.keys() | current.keys()):
        is_inferred = current.get(key) is None and key in _INFERRED and previous[key] == _INFERRED[key]
        if previous.get(key) != current.get(key) and not key.startswith(_MAY_CHANGE) and not is_inferred:
            change = f"{key} was {previous.get(key)}, is {current.get(key)}"
            raise InputError(
                f"{folder}: holds a run of another recipe ({change}); choose another --output, or remove it"
            )


def lock_run_folder(folder: Path) -> int | None:
    """Create the folder and lock it against other processes until the returned file descriptor is closed.

    The operating system releases the lock if this process dies. Returns None where there are no such locks.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock_fd = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"{folder}: cannot be created ({error.strerror}); choose another output folder") from None
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock_fd)
        raise InputError(
            f"{folder}: another process is training here; wait for it, or choose another --output"
        ) from None
    except OSError:
        os.close(lock_fd)
        return None
    return lock_fd


# keys that may change in a resumed run: they change nothing but rounding, and include remedies for a lack of memory
_MAY_CHANGE: tuple[str, ...] = (
    "name",
    "test.",
    "data.test",
    "train.num_workers",
    "train.log_every",
    "train.save_every",
)
_MAY_CHANGE += (
    "train.gradient_accumulation_steps",
    "train.activation_checkpointing",
    "train.compile",
    "train.cuda_graphs",
)
_MAY_CHANGE += ("validation.num_samples",)
# settings that are saved although the recipe does not set them, if they are inferred from the data (`infer_settings`)
_INFERRED = {"task.null_score_diff_threshold": 0.0, "task.text_pairs": True}


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
