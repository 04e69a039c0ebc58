"""Metrics of numbers: Pearson and Spearman correlation, computed by SciPy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from qkv.errors import InputError
from qkv.metrics.metric import Metric, Scores, Stats, check_aligned, require_package
from qkv.metrics.registry import MetricEntry


class _Correlation(Metric[float, float]):
    """A correlation coefficient of a sample. NaN if one side is constant."""

    data_kind = "numbers"
    is_additive = False  # the rank of a number depends on all the others
    scipy_function: ClassVar[str]

    def statistics(self, hypotheses: Sequence[float], references: Sequence[float]) -> Stats:
        check_aligned(hypotheses, references)
        if len(hypotheses) < 2:
            raise InputError(f"{self.name} needs at least two examples")
        stats = np.stack([np.asarray(hypotheses, dtype=np.float64), np.asarray(references, dtype=np.float64)], axis=1)
        invalid = np.flatnonzero(~np.isfinite(stats).all(1))
        if len(invalid):
            raise InputError(f"example {invalid[0] + 1}: not a finite number; {self.name} needs numbers only")
        return stats  # [examples, 2]

    def score(self, stats: Stats) -> Scores:
        scipy_stats = require_package("scipy.stats", self.name)
        with warnings.catch_warnings():  # a constant side gives NaN, so no warning is needed
            warnings.simplefilter("ignore")
            return {self.name: float(getattr(scipy_stats, self.scipy_function)(stats[:, 0], stats[:, 1]).statistic)}


class Pearson(_Correlation):
    """Pearson correlation: 1 if the hypotheses are an increasing linear function of the references."""

    name = "pearson"
    scipy_function = "pearsonr"


class Spearman(_Correlation):
    """Spearman rank correlation: 1 if hypotheses and references have the same order; ties share the mean rank."""

    name = "spearman"
    scipy_function = "spearmanr"


PEARSON = MetricEntry("numbers", lambda *_: Pearson())
SPEARMAN = MetricEntry("numbers", lambda *_: Spearman())
