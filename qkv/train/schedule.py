"""Learning rate as a function of the step alone, so that a resumed run needs nothing but its step."""

from __future__ import annotations

import math


def rate(kind: str, step: int, *, peak: float, warmup: int, steps: int) -> float:
    """The rate for step 1, 2, …: it climbs to `peak` over `warmup` steps, then falls as `kind` says.

    `inverse_sqrt` is the Transformer paper's (Vaswani et al. 2017, 5.3), written by its peak: the paper's
    width^-1/2 * min(step^-1/2, step * warmup^-3/2) has its peak (width * warmup)^-1/2 at step `warmup`.
    """
    if step < warmup:
        return peak * step / warmup
    if kind == "inverse_sqrt":
        return peak * math.sqrt(max(warmup, 1) / step)
    share = min(1.0, (step - warmup) / max(1, steps - warmup))
    if kind == "linear":
        return peak * (1 - share)
    if kind == "cosine":
        return peak * (1 + math.cos(math.pi * share)) / 2
    return peak  # constant


def paper_peak(width: int, warmup: int, factor: float = 1.0) -> float:
    """The peak of the paper's schedule for a model of this width."""
    return factor / math.sqrt(width * warmup)
