"""Metrics of numbers: Pearson and Spearman correlation."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qkv.errors import InputError
from qkv.metrics.metric import Metric, Scores, Stats, check_aligned
from qkv.metrics.registry import MetricEntry


class _Correlation(Metric[float, float]):
    """A correlation coefficient of a sample. NaN if one side is constant."""

    data_kind = "numbers"
    is_additive = False  # the rank of a number depends on all the others

    def statistics(self, hypotheses: Sequence[float], references: Sequence[float]) -> Stats:
        check_aligned(hypotheses, references)
        if len(hypotheses) < 2:
            raise InputError(f"{self.name} needs at least two examples")
        stats = np.stack([np.asarray(hypotheses, dtype=np.float64), np.asarray(references, dtype=np.float64)], axis=1)
        invalid = np.flatnonzero(~np.isfinite(stats).all(1))
        if len(invalid):
            raise InputError(f"example {invalid[0] + 1}: not a finite number; {self.name} needs numbers only")
        return stats  # [examples, 2]

    @abstractmethod
    def coefficient(self, hypotheses: NDArray[np.float64], references: NDArray[np.float64]) -> float:
        """Return the correlation of two samples."""

    def score(self, stats: Stats) -> Scores:
        return {self.name: self.coefficient(stats[:, 0], stats[:, 1])}


class Pearson(_Correlation):
    """Pearson correlation: 1 if the hypotheses are an increasing linear function of the references."""

    name = "pearson"

    def coefficient(self, hypotheses: NDArray[np.float64], references: NDArray[np.float64]) -> float:
        return _pearson(hypotheses, references)


class Spearman(_Correlation):
    """Spearman rank correlation: 1 if hypotheses and references have the same order; ties share the mean rank."""

    name = "spearman"

    def coefficient(self, hypotheses: NDArray[np.float64], references: NDArray[np.float64]) -> float:
        return _pearson(_ranks(hypotheses), _ranks(references))


def _pearson(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Return the cosine of the centered samples; each is scaled first, so that squares neither overflow nor vanish."""
    if (x == x[0]).all() or (y == y[0]).all():
        return math.nan
    centered = [values / np.abs(values).max() for values in (x, y)]
    centered = [values - values.mean() for values in centered]
    norms = [float(np.linalg.norm(values / np.abs(values).max())) for values in centered]
    unit_x, unit_y = (v / np.abs(v).max() / norm for v, norm in zip(centered, norms, strict=True))
    return float(np.clip(unit_x @ unit_y, -1.0, 1.0))


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rank of each value from 1; equal values share the mean of their ranks."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last_ranks = np.cumsum(counts)
    ranks: NDArray[np.float64] = (last_ranks - (counts - 1) / 2)[group]
    return ranks


PEARSON = MetricEntry("numbers", lambda *_: Pearson())
SPEARMAN = MetricEntry("numbers", lambda *_: Spearman())
