"""Numbers against numbers: Pearson's and Spearman's correlation, by SciPy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from qkv.errors import InputError
from qkv.metrics.metric import Metric, Scores, Stats, check_aligned, require_package


class _Correlation(Metric[float, float]):
    """Belongs to a sample: a rank depends on all the others. Not a number where one side is constant."""

    is_additive = False
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
        with warnings.catch_warnings():  # a constant side gives not-a-number, which says it
            warnings.simplefilter("ignore")
            return {self.name: float(getattr(scipy_stats, self.scipy_function)(stats[:, 0], stats[:, 1]).statistic)}


class Pearson(_Correlation):
    """How near to a straight line."""

    name = "pearson"
    scipy_function = "pearsonr"


class Spearman(_Correlation):
    """How near to the same order; equal numbers share their ranks' mean."""

    name = "spearman"
    scipy_function = "spearmanr"
