"""Whose a run's folder is: the first recipe's that began there, and one process's at a time."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qkv.errors import InputError
from qkv.train.checkpoint import has_last
from qkv.train.recipe import read_recipe
from qkv.train.sections import AnyRecipe
from qkv.weights.folder import finished

RECIPE = "recipe.yaml"


def claim(folder: Path, recipe: AnyRecipe) -> None:
    """A folder holds one run: another recipe is refused before anything is touched."""
    path = folder / RECIPE
    if not path.is_file() or not (has_last(folder) or finished(folder)):
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder}: is a file; choose another output folder")
        return
    earlier, now = _flat(asdict(read_recipe(path))), _flat(asdict(recipe))
    for key in sorted(earlier.keys() | now.keys()):
        found_out = now.get(key) is None and key in _FOUND_OUT and earlier[key] == _FOUND_OUT[key]
        if earlier.get(key) != now.get(key) and not key.startswith(_FREE) and not found_out:
            was = f"{key} was {earlier.get(key)}, is {now.get(key)}"
            raise InputError(f"{folder}: holds a run of another recipe ({was}); choose another --output, or remove it")


def hold(folder: Path) -> int | None:
    """Makes the folder, and keeps other processes from training in it until what is given is closed.

    The system lets go of it by itself where this process dies. On systems or disks without such locks there is none.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made ({error.strerror}); choose another output folder") from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise InputError(
            f"{folder}: another process is training here; wait for it, or choose another --output"
        ) from None
    except OSError:
        os.close(held)
        return None
    return held


# may change without changing the numbers, or by no more than rounding: what to try when memory runs out is among them
_FREE = ("name", "test.", "data.test", "train.workers", "train.log_every", "train.save_every", "train.accumulate")
_FREE += ("train.recompute", "train.compile", "train.graph", "valid.samples")
# what is written down where a recipe says nothing and the training examples do (`found_out` of tasks)
_FOUND_OUT = {"task.threshold": 0.0, "task.pairs": True}


def _flat(values: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return found
