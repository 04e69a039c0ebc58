"""Learning-rate schedules and callbacks by name, without importing them or torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qkv.registry import Registry

SCHEDULES: Registry[Callable[[int, int, int], float]] = Registry(
    "schedule",
    {
        "inverse_sqrt": "qkv.train.schedule:inverse_sqrt",
        "linear": "qkv.train.schedule:linear",
        "cosine": "qkv.train.schedule:cosine",
        "constant": "qkv.train.schedule:constant",
        "slanted_triangular": "qkv.train.schedule:slanted_triangular",
    },
)
"""Schedule functions `(step, warmup_steps, max_steps) -> fraction of the peak rate`, for steps after the warm-up."""

CALLBACKS: Registry[Callable[[], Any]] = Registry(
    "callback", {"wandb": "qkv.train.tracking:WandbCallback", "mlflow": "qkv.train.tracking:MLflowCallback"}
)
"""Factories of callbacks; see `qkv.train.callbacks.Callback`."""
