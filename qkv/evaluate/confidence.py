"""How sure a figure is: bootstrap intervals of one system, and two tests whether another is really better.

All work on any `Metric`. What an example adds is counted once; a resample is a weighted sum of those counts, and many
resamples are one matrix product. Only for figures of a whole sample (`summed` is False) examples are drawn one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.errors import InputError
from qkv.evaluate.metric import Figures, Metric, Rows

RESAMPLES = 1000
_CHUNK = 2**22  # drawn examples that are held at once


@dataclass(frozen=True)
class Interval:
    """Between these two lies the given share of the resampled figures."""

    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """The first system's figure less the second's, and how easily chance alone would give as much."""

    difference: float
    interval: Interval
    p_bootstrap: float
    p_randomisation: float


def bootstrap(
    metric: Metric[Any, Any], rows: Rows, *, resamples: int = RESAMPLES, seed: int = 0, level: float = 0.95
) -> dict[str, Interval]:
    """Each figure's percentile interval over resampled examples (Efron 1979).

    A resample in which a figure is not defined, a correlation with a constant say, is left out of that figure.
    """
    _check(rows, resamples, level)
    drawn = [scores for (scores,) in _resampled(metric, (rows,), resamples, seed)]
    return {name: _interval(np.array([s.get(name, np.nan) for s in drawn]), level) for name in metric.of(rows)}


def compare(
    metric: Metric[Any, Any],
    rows: Rows,
    other: Rows,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = 0.95,
) -> dict[str, Comparison]:
    """Two systems on the same examples, each figure of the first against the second.

    - `p_bootstrap` (paired bootstrap, Koehn 2004): the share of resamples in which the system that is ahead is not.
    - `p_randomisation` (approximate randomisation, Noreen 1989; Riezler & Maxwell 2005): the share of random swaps of
      the two systems' outputs that give at least as large a difference, either way.

    Both count the sample itself as one more draw, so that neither is ever 0.
    """
    if rows.shape != other.shape:
        raise InputError(
            f"two systems with statistics of {rows.shape} and {other.shape}; score them on the same examples"
        )
    _check(rows, resamples, level)
    first, second = metric.of(rows), metric.of(other)
    drawn = list(_resampled(metric, (rows, other), resamples, seed))
    swapped = list(_swapped(metric, rows, other, resamples, seed))
    out = {}
    for name in first:
        difference = first[name] - second.get(name, np.nan)
        sampled, by_chance = _differences(drawn, name), _differences(swapped, name)
        # Written so that what is not a number speaks against a difference.
        behind = ~(sampled * np.sign(difference) > 0)
        # Equal up to rounding is equal: a swap of nothing must not count as smaller for its last bit.
        as_large = ~(np.abs(by_chance) < abs(difference) * (1 - 1e-9) - 1e-12)
        out[name] = Comparison(difference, _interval(sampled, level), _p(behind), _p(as_large))
    return out


def _check(rows: Rows, resamples: int, level: float) -> None:
    if resamples < 1:
        raise InputError(f"{resamples} resamples; use 1 or more")
    if not 0 < level < 1:
        raise InputError(f"a confidence level of {level}; use one between 0 and 1, such as 0.95")
    if not len(rows):
        raise InputError("no examples to resample; give at least one")


def _resampled(
    metric: Metric[Any, Any], systems: tuple[Rows, ...], resamples: int, seed: int
) -> Iterator[tuple[Figures, ...]]:
    """Figures of every system on the same examples, drawn with replacement."""
    size = len(systems[0])
    for chosen in _draws(resamples, size, seed, lambda draw, shape: draw.integers(size, size=shape)):
        if not metric.summed:
            yield from (tuple(metric.score(rows[one]) for rows in systems) for one in chosen)
            continue
        apart = chosen + size * np.arange(len(chosen))[:, None]
        counts = np.bincount(apart.ravel(), minlength=chosen.size).reshape(chosen.shape)  # [resamples, examples]
        sums = [counts @ rows for rows in systems]  # [resamples, k] each
        yield from (tuple(map(metric.score, of_each)) for of_each in zip(*sums, strict=True))


def _swapped(
    metric: Metric[Any, Any], rows: Rows, other: Rows, resamples: int, seed: int
) -> Iterator[tuple[Figures, Figures]]:
    """Figures of two systems that exchange each example's outputs with probability one half."""
    for swaps in _draws(resamples, len(rows), seed, lambda draw, shape: draw.integers(2, size=shape)):
        if not metric.summed:
            for swap in swaps[:, :, None].astype(bool):  # [examples, 1]
                yield metric.score(np.where(swap, other, rows)), metric.score(np.where(swap, rows, other))
            continue
        moved = swaps @ (other - rows)  # [resamples, k]
        for change in moved:
            yield metric.score(rows.sum(0) + change), metric.score(other.sum(0) - change)


def _draws(
    resamples: int, size: int, seed: int, draw: Callable[[np.random.Generator, tuple[int, int]], NDArray[np.int64]]
) -> Iterator[NDArray[np.int64]]:
    """All draws in portions that fit into memory; the numbers do not depend on the portions.  # [n, examples]"""
    generator = np.random.default_rng(seed)
    portion = max(1, _CHUNK // size)
    for first in range(0, resamples, portion):
        yield draw(generator, (min(portion, resamples - first), size))


def _differences(scores: Sequence[tuple[Figures, ...]], name: str) -> NDArray[np.float64]:
    return np.array([first.get(name, np.nan) - second.get(name, np.nan) for first, second in scores])


def _interval(values: NDArray[np.float64], level: float) -> Interval:
    known = values[~np.isnan(values)]
    if not len(known):
        return Interval(np.nan, np.nan)
    # of the nearest draws, for a mean of two would make not-a-number of two infinite perplexities
    low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2], method="nearest")
    return Interval(float(low), float(high))


def _p(against: NDArray[np.bool_]) -> float:
    return (int(against.sum()) + 1) / (len(against) + 1)
