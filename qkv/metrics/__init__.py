"""Metrics of texts, labels, numbers, tags and answers, with confidence intervals.

The names below are imported when they are first used: most metrics need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkv.metrics.error_rate import edit_distance, error_rates
    from qkv.metrics.seq2seq import EvaluationResult, evaluate, reference_loss

__all__ = ["EvaluationResult", "edit_distance", "error_rates", "evaluate", "reference_loss"]

_MODULES = {"edit_distance": "qkv.metrics.error_rate", "error_rates": "qkv.metrics.error_rate"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'qkv.metrics' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES.get(name, "qkv.metrics.seq2seq")), name)
