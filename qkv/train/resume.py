"""What changes when a run is resumed or extended, and the lines that say so."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from qkv.errors import InputError
from qkv.train.run_folder import RunChange
from qkv.train.run_log import format_metric
from qkv.train.schedule import RunLength, learning_rate_at, peak_learning_rate, resolve_steps
from qkv.train.train_state import TrainState

if TYPE_CHECKING:
    from qkv.train.trainer import Trainer

_MAX_RESTART_WARMUP = 100
# keys of `validation` that do not change the value of the metric
_SAME_VALUES = ("every_steps", "patience", "num_samples", "keep")


def validation_settings(trainer: Trainer) -> str:
    """Return the settings that validation metrics depend on; values under different settings are not compared."""
    section: Any = trainer.recipe.validation
    settings = {name: value for name, value in dataclasses.asdict(section).items() if name not in _SAME_VALUES}
    return json.dumps(settings | {"metric": trainer.workload.metric}, sort_keys=True)


def apply_change(trainer: Trainer, change: RunChange) -> bool:
    """Adapt the progress of a resumed run to what its recipe changes; return whether the best value was reset."""
    train_state, settings = trainer.train_state, validation_settings(trainer)
    reset_best = train_state.validation_settings not in ("", settings)
    if reset_best:
        train_state.best_metric, train_state.best_step, train_state.validations_since_best = None, 0, 0
    train_state.validation_settings = settings
    if train_state.step > trainer.max_steps:
        message = f"the run is at step {train_state.step:,}, and the recipe ends at step {trainer.max_steps:,}"
        raise InputError(f"{trainer.folder}: {message}; raise train.max_steps, or choose another --output")
    if change.changes_length:
        patience = trainer.recipe.validation.patience
        train_state.finished = patience is not None and train_state.validations_since_best >= patience
    return reset_best


def restart_factor(train_state: TrainState, step: int, max_steps: int) -> float:
    """Return the factor of the learning rate while an optimizer that lost its state warms up again."""
    restart = train_state.optimizer_restart
    return min(1.0, (step - restart) / _restart_warmup(restart, max_steps)) if 0 < restart < step else 1.0


def _restart_warmup(restart: int, max_steps: int) -> int:
    return min(_MAX_RESTART_WARMUP, max(1, (max_steps - restart) // 10))


def resume_notes(trainer: Trainer, change: RunChange, was_finished: bool) -> Iterator[str]:
    """Yield the lines about a run that is resumed or, if it was finished, extended."""
    train_state, recipe, length = trainer.train_state, trainer.recipe, trainer.length
    step, max_steps = f"step {train_state.step:,}", f"{length.max_steps:,}"
    action = f"resuming {trainer.folder} at {step} of {max_steps}"
    if was_finished:
        action = f"extending {trainer.folder} from {step} to {max_steps}"
    unit = "window" if getattr(recipe.data, "streaming", False) else "epoch"
    best = ""
    if train_state.best_metric is not None:
        value = format_metric(trainer.workload.metric, train_state.best_metric)
        best = f", best {value} at step {train_state.best_step:,}"
    yield f"{action} ({unit} {train_state.epoch + 1:,}){best}"
    if trainer.is_best_reset:
        yield "the validation settings changed: earlier validations are not compared with those from here on"
    if change.previous is not None and change.changes_length:
        previous_length = resolve_steps(change.previous, trainer.workload.steps_per_epoch)
        yield from _schedule_note(trainer, previous_length, length)
    if train_state.optimizer_restart == train_state.step:
        warmup = _restart_warmup(train_state.step, length.max_steps)
        reason = "its checkpoint was removed at the end (train.keep_checkpoint: true keeps it)"
        yield f"{reason}: training starts from the saved weights with a new optimizer and {warmup:,} warm-up steps"


def _schedule_note(trainer: Trainer, previous: RunLength, length: RunLength) -> Iterator[str]:
    """Yield a line if the learning rates of the past would have been other ones with the new number of steps."""
    step, schedule = trainer.train_state.step, trainer.recipe.train.schedule

    def rate(run_length: RunLength, at_step: int) -> float:
        peak_lr = peak_learning_rate(trainer.recipe.train, trainer.workload.spec, run_length.warmup_steps)
        steps = {"warmup_steps": run_length.warmup_steps, "max_steps": run_length.max_steps}
        return learning_rate_at(schedule, at_step, peak_lr=peak_lr, **steps)

    old_rate, new_rate = rate(previous, step), rate(length, step)
    if abs(old_rate - new_rate) > 1e-6 * max(abs(old_rate), abs(new_rate)):
        steps = f"{length.max_steps:,} steps instead of {previous.max_steps:,}"
        rates = f"{old_rate:.3g} at step {step:,}, {rate(length, step + 1):.3g} at step {step + 1:,}"
        yield f"the schedule ({schedule}) is now that of {steps}: the learning rate was {rates}"
