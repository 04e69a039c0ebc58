"""Perplexity from sums of negative log-probabilities: exp of the mean over tokens, never a mean of perplexities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from qkv.errors import InputError
from qkv.metrics.metric import Metric, Scores, Stats, check_aligned
from qkv.metrics.registry import MetricEntry


class Perplexity(Metric[float, float]):
    """Perplexity. Hypotheses: the sum of negative natural log-probabilities of each text. References: its unit count.

    Units are tokens, or words or characters of the text, which makes models with different tokenizers comparable.
    """

    name = "perplexity"
    data_kind = "numbers"
    higher_is_better = False
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


PERPLEXITY = MetricEntry("numbers", lambda *_: Perplexity(), higher_is_better=False)


def mean_losses(batches: Iterable[Sequence[tuple[float, int]]]) -> list[float]:
    """Return the mean of each loss over the targets of all batches.

    Args:
        batches: for each batch the sum of each loss and its number of targets, in the same order.
    """
    sums: list[tuple[float, int]] = []
    for losses in batches:
        sums = sums or [(0.0, 0)] * len(losses)
        sums = [(total + loss, count + targets) for (total, count), (loss, targets) in zip(sums, losses, strict=True)]
    return [total / max(count, 1) for total, count in sums]
