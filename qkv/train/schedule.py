"""Learning rate as a function of the step alone, so that a resumed run needs nothing but its step."""

from __future__ import annotations

import math


def learning_rate_at(schedule: str, step: int, *, peak_lr: float, warmup_steps: int, max_steps: int) -> float:
    """The rate for step 1, 2, …: it climbs to `peak_lr` over `warmup_steps`, then falls as `schedule` says.

    `inverse_sqrt` is the Transformer paper's (Vaswani et al. 2017, 5.3), written by its peak: the paper's
    d_model^-1/2 * min(step^-1/2, step * warmup_steps^-3/2) has its peak (d_model * warmup_steps)^-1/2 at that step.
    """
    if step < warmup_steps:
        return peak_lr * step / warmup_steps
    if schedule == "inverse_sqrt":
        return peak_lr * math.sqrt(max(warmup_steps, 1) / step)
    progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    if schedule == "linear":
        return peak_lr * (1 - progress)
    if schedule == "cosine":
        return peak_lr * (1 + math.cos(math.pi * progress)) / 2
    return peak_lr  # constant


def noam_peak(d_model: int, warmup_steps: int, factor: float = 1.0) -> float:
    """The peak of the paper's schedule for a model of this width."""
    return factor / math.sqrt(d_model * warmup_steps)
