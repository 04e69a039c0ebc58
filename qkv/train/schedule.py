"""Learning-rate schedules, and the length of a run in steps.

The rate is a function of the step alone, so that a resumed run needs only its step. A schedule is a function
`(step, warmup_steps, max_steps) -> fraction of the peak rate` for the steps after the linear warm-up. Register one with
`qkv.register.schedule` and name it in `train.schedule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from qkv import spec
from qkv.errors import InputError
from qkv.recipe.registries import SCHEDULES
from qkv.recipe.schema import Recipe, TrainConfig


def learning_rate_at(schedule: str, step: int, *, peak_lr: float, warmup_steps: int, max_steps: int) -> float:
    """Return the learning rate of a step (1, 2, …): linear warm-up to `peak_lr`, then the schedule."""
    if step < warmup_steps:
        return peak_lr * step / warmup_steps
    return peak_lr * SCHEDULES.get(schedule)(step, warmup_steps, max_steps)


def inverse_sqrt(step: int, warmup_steps: int, max_steps: int) -> float:  # noqa: ARG001
    """Decay with the inverse square root of the step (Vaswani et al. 2017, section 5.3).

    The paper's d_model^-1/2 · min(step^-1/2, step · warmup_steps^-3/2) peaks at step warmup_steps.
    """
    return math.sqrt(max(warmup_steps, 1) / step)


def linear(step: int, warmup_steps: int, max_steps: int) -> float:
    """Decay linearly to zero at the last step."""
    return 1 - _progress(step, warmup_steps, max_steps)


def slanted_triangular(step: int, warmup_steps: int, max_steps: int) -> float:
    """Decay linearly to a 32nd of the peak at the last step (Howard & Ruder 2018, section 3.2)."""
    return 1 - _progress(step, warmup_steps, max_steps) * (1 - 1 / _STLR_RATIO)


def cosine(step: int, warmup_steps: int, max_steps: int) -> float:
    """Decay along half a cosine wave to zero at the last step."""
    return (1 + math.cos(math.pi * _progress(step, warmup_steps, max_steps))) / 2


def constant(step: int, warmup_steps: int, max_steps: int) -> float:  # noqa: ARG001
    """Keep the peak rate."""
    return 1.0


def _progress(step: int, warmup_steps: int, max_steps: int) -> float:
    return min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))


def noam_peak(d_model: int, warmup_steps: int, factor: float = 1.0) -> float:
    """Return the peak rate of the Transformer paper's schedule for a model of this width."""
    return factor / math.sqrt(d_model * warmup_steps)


def peak_learning_rate(train_config: TrainConfig, model_spec: spec.Model, warmup_steps: int) -> float:
    """Return the peak learning rate: `learning_rate`, or the paper's for the model's width (`noam_factor`)."""
    if train_config.noam_factor is None:
        return train_config.learning_rate
    embedding = model_spec.target_embedding or model_spec.source_embedding
    assert embedding is not None  # every model has an input embedding
    if not warmup_steps:
        raise InputError("train.noam_factor: this schedule needs a warm-up; set train.warmup_steps to 1 or more")
    return noam_peak(embedding.d_model, warmup_steps, train_config.noam_factor)


class RunLength(NamedTuple):
    """The durations of a run in optimizer steps."""

    max_steps: int
    warmup_steps: int
    valid_every: int


def resolve_steps(recipe: Recipe, steps_per_epoch: Callable[[], int]) -> RunLength:
    """Return the durations of a run, which a recipe may give in epochs or as a fraction of all steps."""
    train_config, max_steps = recipe.train, recipe.train.max_steps
    if max_steps is None:
        max_steps = max(1, round((train_config.epochs or 0) * steps_per_epoch()))
    default_every = getattr(recipe.validation, "default_every_steps", None) if train_config.epochs is None else None
    valid_every = (
        recipe.validation.every_steps or default_every or _default_valid_every(recipe, max_steps, steps_per_epoch())
    )
    return RunLength(max_steps, train_config.warmup_steps_of(max_steps), valid_every)


def warmup_note(train_config: TrainConfig, length: RunLength) -> str | None:
    """Return a line about a warm-up that the recipe sets and the run is too short for; None if it fits."""
    if train_config.warmup_steps is None or length.warmup_steps <= length.max_steps:
        return None
    reached = f"the learning rate reaches {100 * length.max_steps / length.warmup_steps:.0f} % of its peak"
    return f"train.warmup_steps: {length.warmup_steps:,}, and the run has {length.max_steps:,} steps: {reached}"


def _default_valid_every(recipe: Recipe, max_steps: int, steps_per_epoch: int) -> int:
    """Return the steps between validations at the ends of epochs; fewer are enough if they choose no weights."""
    num_epochs = -(-max_steps // (_MAX_VALIDATIONS * steps_per_epoch)) if recipe.keeps_last_weights else 1
    return num_epochs * steps_per_epoch


_STLR_RATIO = 32  # of the highest to the lowest learning rate
_MAX_VALIDATIONS = 10  # of a run that keeps its last weights
