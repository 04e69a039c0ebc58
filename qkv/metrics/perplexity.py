"""Perplexity from sums of negative log-probabilities: exp of their mean over tokens, never a mean of perplexities."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from qkv.errors import InputError
from qkv.metrics.metric import Metric, Scores, Stats, check_aligned


class Perplexity(Metric[float, float]):
    """Hypotheses: each text's sum of negative natural log-probabilities. References: how many units it is divided by.

    The units may be tokens, or words or characters of the text itself, which makes models with different tokenisers
    comparable.
    """

    name = "perplexity"
    decimals = 3

    def statistics(self, hypotheses: Sequence[float], references: Sequence[float]) -> Stats:
        check_aligned(hypotheses, references)
        stats = np.stack([np.asarray(hypotheses, dtype=np.float64), np.asarray(references, dtype=np.float64)], axis=1)
        invalid = np.flatnonzero(~np.isfinite(stats).all(1) | (stats[:, 1] < 0))
        if len(invalid):
            raise InputError(f"example {invalid[0] + 1}: perplexity needs a finite sum and a count of 0 or more")
        if not stats[:, 1].any():
            raise InputError("perplexity: all counts are 0; give at least one text with tokens")
        return stats

    def score(self, stats: Stats) -> Scores:
        total, count = stats
        mean = float(total / count) if count else math.nan
        largest = math.log(np.finfo(np.float64).max)
        return {
            "perplexity": math.exp(mean) if not mean > largest else math.inf,
            "nats_per_token": mean,
            "bits_per_token": mean / math.log(2),
        }
