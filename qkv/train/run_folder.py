"""Ownership of a run folder: it holds runs of one recipe, and one process trains in it at a time."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from qkv.checkpoints.lora import LORA_FILE
from qkv.checkpoints.model_folder import WEIGHTS_FILE, is_finished
from qkv.checkpoints.unfinished_run import (
    BEST_WEIGHTS,
    LAST_CHECKPOINT,
    SHARDED_LAST_CHECKPOINT,
    has_checkpoint,
)
from qkv.errors import InputError, quote
from qkv.recipe.parse import RECIPE_FILE, read_run_recipe
from qkv.recipe.schema import Recipe
from qkv.train.train_state import STATE_FILE

_MAX_QUOTED = 3  # keys that an error message names


class RunChange(NamedTuple):
    """The recipe of the run in a folder, and the keys whose values differ now."""

    previous: Recipe | None = None  # None: the folder holds no run
    keys: frozenset[str] = frozenset()

    @property
    def changes_length(self) -> bool:
        """Whether the run may now end at another step."""
        return not self.keys.isdisjoint(_LENGTH_KEYS)


def holds_run(folder: Path) -> bool:
    """Return whether a folder holds a run, finished or with a checkpoint."""
    return has_checkpoint(folder) or is_finished(folder)


def compare_recipe(folder: Path, recipe: Recipe) -> RunChange:
    """Return the differences from the recipe of the folder's run; a change of what was trained so far is refused."""
    path = folder / RECIPE_FILE
    if not path.is_file() or not holds_run(folder):
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder}: is a file; choose another output folder")
        return RunChange()
    previous_recipe = read_run_recipe(path)
    previous, current = flatten_settings(asdict(previous_recipe)), flatten_settings(asdict(recipe))
    keys = [key for key in sorted(previous.keys() | current.keys()) if previous.get(key) != current.get(key)]
    refused = [key for key in keys if not key.startswith(_MAY_CHANGE) and not _is_inferred(key, previous, current)]
    if refused:
        changes = [f"{key} was {_show(previous.get(key))}, is {_show(current.get(key))}" for key in refused]
        rest = f" and {len(changes) - _MAX_QUOTED} more" if len(changes) > _MAX_QUOTED else ""
        raise InputError(
            f"{folder}: holds a run of another recipe ({'; '.join(changes[:_MAX_QUOTED])}{rest}); "
            "choose another --output, or restore the run's values"
        )
    return RunChange(previous_recipe, frozenset(keys))


def _is_inferred(key: str, previous: dict[str, Any], current: dict[str, Any]) -> bool:
    """Return whether a run has a setting that its recipe does not set, because it was inferred from the data."""
    if current.get(key) is not None:
        return False
    return key.startswith(_DETECTED) or (key in _INFERRED and previous[key] == _INFERRED[key])


def _show(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 and text.isprintable() else quote(text)


def reopen_finished(folder: Path) -> None:
    """Make a finished run an unfinished one, after its checkpoint was written; its weights are its best so far."""
    for name in (WEIGHTS_FILE, LORA_FILE):
        if not (folder / name).is_file():
            continue
        if (folder / BEST_WEIGHTS).is_file():
            (folder / name).unlink()
        else:
            os.replace(folder / name, folder / BEST_WEIGHTS)


def remove_training_files(folder: Path) -> None:
    """Remove what a finished run does not need: the checkpoint, the best weights and those to be averaged."""
    for path in _training_files(folder):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _training_files(folder: Path) -> list[Path]:
    patterns = (LAST_CHECKPOINT, SHARDED_LAST_CHECKPOINT, "last-*", BEST_WEIGHTS, "step-*.safetensors")
    return [path for pattern in patterns for path in folder.glob(pattern)]


def clean_finished(folder: Path, recipe: Recipe) -> None:
    """Remove the training files of a finished run that was killed while it removed them."""
    if recipe.train.keep_checkpoint or not (folder / STATE_FILE).is_file() or not _training_files(folder):
        return
    try:
        lock_fd = lock_run_folder(folder)
    except InputError:  # another process extends the run
        return
    try:
        with contextlib.suppress(OSError):
            remove_training_files(folder)
    finally:
        if lock_fd is not None:
            os.close(lock_fd)


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


# keys that decide at which step a run ends
_LENGTH_KEYS = ("train.max_steps", "train.epochs", "validation.patience")
# keys that may change in a resumed run: they do not concern the steps so far, or change nothing but rounding
_MAY_CHANGE: tuple[str, ...] = (*_LENGTH_KEYS, "name", "test.", "data.test", "validation.")
_MAY_CHANGE += ("train.num_workers", "train.log_every", "train.save_every", "train.keep_checkpoint", "train.callbacks")
_MAY_CHANGE += ("train.average_checkpoints",)
_MAY_CHANGE += (  # remedies for a lack of memory or speed
    "train.gradient_accumulation_steps",
    "train.activation_checkpointing",
    "train.compile",
    "train.cuda_graphs",
)
# settings that are saved although the recipe does not set them, if they are inferred from the data (`infer_settings`)
_DETECTED = ("data.delimiter", "data.encoding", "task.word_rules")
_INFERRED = {"task.null_score_diff_threshold": 0.0, "task.text_pairs": True}


def flatten_settings(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten_settings(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
