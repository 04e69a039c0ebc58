"""Numbers against numbers: Pearson's and Spearman's correlation, by SciPy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from qkv.errors import InputError
from qkv.evaluate.metric import Figures, Metric, Rows, check_aligned, library


class _Correlation(Metric[float, float]):
    """Belongs to a sample: a rank depends on all the others. Not a number where one side is constant."""

    summed = False
    function: ClassVar[str]

    def statistics(self, hypotheses: Sequence[float], references: Sequence[float]) -> Rows:
        check_aligned(hypotheses, references)
        if len(hypotheses) < 2:
            raise InputError(f"{self.name} needs at least two examples")
        rows = np.stack([np.asarray(hypotheses, dtype=np.float64), np.asarray(references, dtype=np.float64)], axis=1)
        wrong = np.flatnonzero(~np.isfinite(rows).all(1))
        if len(wrong):
            raise InputError(f"example {wrong[0] + 1}: not a finite number; {self.name} needs numbers only")
        return rows  # [examples, 2]

    def score(self, found: Rows) -> Figures:
        stats = library("scipy.stats", self.name)
        with warnings.catch_warnings():  # a constant side gives not-a-number, which says it
            warnings.simplefilter("ignore")
            return {self.name: float(getattr(stats, self.function)(found[:, 0], found[:, 1]).statistic)}


class Pearson(_Correlation):
    """How near to a straight line."""

    name = "pearson"
    function = "pearsonr"


class Spearman(_Correlation):
    """How near to the same order; equal numbers share their ranks' mean."""

    name = "spearman"
    function = "spearmanr"
