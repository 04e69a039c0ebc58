"""Callbacks: code of the user that the trainer calls at steps, validations and checkpoints.

Register one with `qkv.register.callback("name")` and name it in `train.callbacks`, or pass an instance to `qkv.fit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qkv.errors import InputError, check_type
from qkv.recipe.registries import CALLBACKS

if TYPE_CHECKING:
    from qkv.train.run_log import Record
    from qkv.train.trainer import Trainer

__all__ = ["CALLBACKS", "Callback", "make_callbacks"]


class Callback:
    """Base class of callbacks; every method does nothing unless it is overridden.

    Callbacks run in the main process of a distributed run. They may read the trainer, its model and its state. Setting
    `trainer.train_state.finished = True` ends the run after the current step.
    """

    def on_step(self, trainer: Trainer, record: Record) -> None:
        """Called when a training record is logged, every `train.log_every` steps."""

    def on_validation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Called after each validation with its metrics."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Called after a checkpoint was written; `path` is the run folder that contains it."""

    def on_end(self, trainer: Trainer) -> None:
        """Called once when the run ends, also if it is interrupted or fails."""


def make_callbacks(names: Sequence[str], instances: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks of a run: those that its recipe names, newly created, and the given instances."""
    callbacks = [*(CALLBACKS.get(name)() for name in names), *instances]
    check_callbacks(callbacks)
    return callbacks


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuse anything but a list of callbacks."""
    check_type(callbacks, (list, tuple), "callbacks", "a list of callbacks")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            reason = f"{type(callback).__name__} does not"
            raise InputError(f"a callback derives from qkv.train.callbacks.Callback; {reason}")
