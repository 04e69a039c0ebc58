"""Significance of scores: bootstrap intervals of one system, and two tests of the difference of two systems.

They work with any `Metric`. The statistics of each example are computed once; a resample is a weighted sum of them, and
many resamples are one matrix product. Only metrics that are not additive are computed on each resample anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.errors import InputError
from qkv.metrics.metric import Metric, Scores, Stats

DEFAULT_RESAMPLES = 1000
_MAX_DRAWN_EXAMPLES = 2**22  # drawn examples in memory at once


@dataclass(frozen=True)
class Interval:
    """A confidence interval: the percentiles of the resampled scores."""

    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """The difference of two systems in one score; see `compare`."""

    difference: float
    """Score of the system minus score of the baseline."""
    interval: Interval
    """Confidence interval of the difference."""
    p_bootstrap: float
    """p-value of the paired bootstrap."""
    p_randomization: float
    """p-value of approximate randomization."""


def bootstrap(
    metric: Metric[Any, Any], stats: Stats, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0, level: float = 0.95
) -> dict[str, Interval]:
    """Return the percentile interval of each score over resampled examples (Efron 1979).

    A resample in which a score is undefined, such as a correlation with a constant, is left out for that score.
    """
    _check_arguments(stats, resamples, level)
    resampled_scores = [scores for (scores,) in _resample_scores(metric, (stats,), resamples, seed)]
    return {
        name: _percentile_interval(np.array([s.get(name, np.nan) for s in resampled_scores]), level)
        for name in metric.compute(stats)
    }


def compare(
    metric: Metric[Any, Any],
    stats: Stats,
    baseline_stats: Stats,
    *,
    resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
    level: float = 0.95,
) -> dict[str, Comparison]:
    """Compare each score of a system with that of a baseline on the same examples.

    - `p_bootstrap` (paired bootstrap, Koehn 2004): fraction of resamples in which the better system is not better.
    - `p_randomization` (approximate randomization, Noreen 1989; Riezler & Maxwell 2005): fraction of random swaps of
      the two systems' outputs whose absolute difference is at least as large.

    Both count the sample itself as one more draw, so that neither is ever 0.
    """
    if stats.shape != baseline_stats.shape:
        raise InputError(
            f"two systems with statistics of {stats.shape} and {baseline_stats.shape}; score them on the same examples"
        )
    _check_arguments(stats, resamples, level)
    scores, baseline_scores = metric.compute(stats), metric.compute(baseline_stats)
    resampled_scores = list(_resample_scores(metric, (stats, baseline_stats), resamples, seed))
    swapped_scores = list(_swap_scores(metric, stats, baseline_stats, resamples, seed))
    comparisons = {}
    for name in scores:
        difference = scores[name] - baseline_scores.get(name, np.nan)
        resampled_differences, swapped_differences = (
            _score_differences(resampled_scores, name),
            _score_differences(swapped_scores, name),
        )
        # written so that NaN counts against a difference
        not_ahead = ~(resampled_differences * np.sign(difference) > 0)
        # equal up to rounding: a swap without effect must not count as smaller because of its last bit
        as_large = ~(np.abs(swapped_differences) < abs(difference) * (1 - 1e-9) - 1e-12)
        comparisons[name] = Comparison(
            difference, _percentile_interval(resampled_differences, level), _p_value(not_ahead), _p_value(as_large)
        )
    return comparisons


def _check_arguments(stats: Stats, resamples: int, level: float) -> None:
    if resamples < 1:
        raise InputError(f"{resamples} resamples; use 1 or more")
    if not 0 < level < 1:
        raise InputError(f"a confidence level of {level}; use one between 0 and 1, such as 0.95")
    if not len(stats):
        raise InputError("no examples to resample; give at least one")


def _resample_scores(
    metric: Metric[Any, Any], systems: tuple[Stats, ...], resamples: int, seed: int
) -> Iterator[tuple[Scores, ...]]:
    """Yield the scores of all systems on the same examples, drawn with replacement."""
    num_examples = len(systems[0])
    for drawn_indices in _draw_in_chunks(
        resamples, num_examples, seed, lambda draw, shape: draw.integers(num_examples, size=shape)
    ):
        if not metric.is_additive:
            yield from (tuple(metric.score(stats[indices]) for stats in systems) for indices in drawn_indices)
            continue
        flat_indices = drawn_indices + num_examples * np.arange(len(drawn_indices))[:, None]
        counts = np.bincount(flat_indices.ravel(), minlength=drawn_indices.size).reshape(
            drawn_indices.shape
        )  # [resamples, examples]
        sums = [counts @ stats for stats in systems]  # [resamples, k] each
        yield from (tuple(map(metric.score, summed_stats)) for summed_stats in zip(*sums, strict=True))


def _swap_scores(
    metric: Metric[Any, Any], stats: Stats, baseline_stats: Stats, resamples: int, seed: int
) -> Iterator[tuple[Scores, Scores]]:
    """Yield the scores of two systems whose outputs are swapped for each example with probability one half."""
    for swaps in _draw_in_chunks(resamples, len(stats), seed, lambda draw, shape: draw.integers(2, size=shape)):
        if not metric.is_additive:
            for swap in swaps[:, :, None].astype(bool):  # [examples, 1]
                yield (
                    metric.score(np.where(swap, baseline_stats, stats)),
                    metric.score(np.where(swap, stats, baseline_stats)),
                )
            continue
        changes = swaps @ (baseline_stats - stats)  # [resamples, k]
        for change in changes:
            yield metric.score(stats.sum(0) + change), metric.score(baseline_stats.sum(0) - change)


def _draw_in_chunks(
    resamples: int,
    num_examples: int,
    seed: int,
    draw: Callable[[np.random.Generator, tuple[int, int]], NDArray[np.int64]],
) -> Iterator[NDArray[np.int64]]:
    """Yield all draws in chunks that fit into memory. The numbers do not depend on the chunk size.  # [n, examples]"""
    generator = np.random.default_rng(seed)
    chunk_size = max(1, _MAX_DRAWN_EXAMPLES // num_examples)
    for start in range(0, resamples, chunk_size):
        yield draw(generator, (min(chunk_size, resamples - start), num_examples))


def _score_differences(scores: Sequence[tuple[Scores, ...]], name: str) -> NDArray[np.float64]:
    return np.array(
        [
            system_scores.get(name, np.nan) - baseline_scores.get(name, np.nan)
            for system_scores, baseline_scores in scores
        ]
    )


def _percentile_interval(values: NDArray[np.float64], level: float) -> Interval:
    defined_values = values[~np.isnan(values)]
    if not len(defined_values):
        return Interval(np.nan, np.nan)
    # nearest: interpolating between two infinite perplexities would give NaN
    low, high = np.quantile(defined_values, [(1 - level) / 2, (1 + level) / 2], method="nearest")
    return Interval(float(low), float(high))


def _p_value(is_contrary: NDArray[np.bool_]) -> float:
    return (int(is_contrary.sum()) + 1) / (len(is_contrary) + 1)
