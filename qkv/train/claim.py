"""Whose a run's folder is: the first recipe's that began there."""

from __future__ import annotations

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
        if earlier.get(key) != now.get(key) and not key.startswith(_FREE):
            was = f"{key} was {earlier.get(key)}, is {now.get(key)}"
            raise InputError(f"{folder}: holds a run of another recipe ({was}); choose another --output, or remove it")


# may change without changing the numbers, or by no more than rounding: what to try when memory runs out is among them
_FREE = ("name", "test.", "data.test", "train.workers", "train.log_every", "train.save_every", "train.accumulate")
_FREE += ("train.recompute", "train.compile", "train.graph", "valid.samples")


def _flat(values: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return found
