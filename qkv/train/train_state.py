"""The progress of a run, as its checkpoint stores it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkv.errors import InputError, describe_value
from qkv.files import atomic_write_text, parse_json, read_file

STATE_FILE = "train_state.json"  # the progress of a finished run whose checkpoint was removed
_MAX_COUNT = 2**53  # larger integers are no counts of a run
_MAX_AVERAGED = 10_000
_MAX_TEXT = 10_000
# a stream may have windows without a batch, but not this many per step
_EPOCHS_PER_STEP = 100


@dataclass
class TrainState:
    """The progress of a run."""

    step: int = 0
    epoch: int = 0
    batch_index: int = 0  # the next batch of the epoch
    best_metric: float | None = None  # best value of the validation metric
    best_step: int = 0  # its step
    validations_since_best: int = 0
    averaging_steps: list[int] = field(default_factory=list)  # steps of the saved weights that are averaged at the end
    tokens: int = 0  # trained on so far
    train_seconds: float = 0.0  # spent in training steps
    finished: bool = False
    data_fingerprint: str = ""  # digest of the training data: a position is only valid for the same data
    validation_settings: str = ""  # metric and data of the validations: others give values that cannot be compared
    optimizer_restart: int = 0  # step after which the optimizer started again without its state; 0: never

    def to_json(self) -> str:
        """Return the progress as JSON."""
        return json.dumps(dataclasses.asdict(self))


def parse_train_state(text: str | bytes, where: str) -> TrainState:
    """Return the progress of a run; anything but what `TrainState.to_json` writes is refused in one line.

    Args:
        text: the JSON text.
        where: the file, with which the error message begins.
    """
    return train_state_from(parse_json(text, where, allow_nan=True), where)


def train_state_from(values: Any, where: str) -> TrainState:
    """Return the progress of a run from parsed JSON."""
    if not isinstance(values, dict):
        raise _refusal(where, "the progress of the run", values)
    unknown = sorted(map(str, values.keys() - _CHECKS.keys()))
    missing = sorted(_REQUIRED - values.keys())
    if unknown or missing:
        key, problem = (unknown[0], "is unknown") if unknown else (missing[0], "is missing")
        raise InputError(f"{where}: {describe_value(key)} of the run's progress {problem}; {_REMEDY}")
    for name, value in values.items():
        if not _CHECKS[name](value):
            raise _refusal(where, name, value)
    train_state = TrainState(**values)
    step = train_state.step
    largest = {"best_step": step, "optimizer_restart": step, "batch_index": step, "epoch": _EPOCHS_PER_STEP * step}
    for name, limit in largest.items():
        if getattr(train_state, name) > limit:
            raise _refusal(where, name, getattr(train_state, name))
    if max(train_state.averaging_steps, default=0) > step:
        raise _refusal(where, "averaging_steps", max(train_state.averaging_steps))
    return train_state


def write_state_file(folder: Path, train_state: TrainState) -> None:
    """Write the progress of a finished run, with which it can be extended."""
    atomic_write_text(folder / STATE_FILE, train_state.to_json() + "\n")


def read_state_file(folder: Path) -> TrainState:
    """Return the progress of a finished run."""
    path = folder / STATE_FILE
    if not path.is_file():
        reason = f"the finished run has neither a checkpoint nor {STATE_FILE}, so it cannot be extended"
        raise InputError(f"{folder}: {reason}; choose another --output and start from it (model.init_from)")
    return parse_train_state(read_file(path), str(path))


_REMEDY = "restore it, or remove it to train from the start"


def _refusal(where: str, name: str, value: object) -> InputError:
    return InputError(f"{where}: {name} cannot be {describe_value(value)}; {_REMEDY}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_COUNT


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_seconds(value: Any) -> bool:
    return _is_number(value) and 0 <= value < math.inf


def _is_metric(value: object) -> bool:
    return value is None or _is_number(value)  # the correlation of constant predictions is NaN


def _is_count_list(value: object) -> bool:
    return isinstance(value, list) and len(value) <= _MAX_AVERAGED and all(map(_is_count, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT


_CHECKS: dict[str, Callable[[Any], bool]] = dict.fromkeys(
    ("step", "epoch", "batch_index", "best_step", "validations_since_best", "tokens", "optimizer_restart"), _is_count
)
_CHECKS |= {"best_metric": _is_metric, "averaging_steps": _is_count_list, "train_seconds": _is_seconds}
_CHECKS |= {"finished": lambda value: isinstance(value, bool)}
_CHECKS |= {"data_fingerprint": _is_text, "validation_settings": _is_text}
# fields that checkpoints of earlier versions lack
_REQUIRED = _CHECKS.keys() - {"validation_settings", "optimizer_restart"}
