"""Intervals and paired tests: sums of statistics give the same as resampled examples, and both have the right level."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from qkv.errors import InputError
from qkv.metrics.classification import F1, Accuracy, MatthewsCorrelation
from qkv.metrics.correlation import Pearson, Spearman
from qkv.metrics.entities import EntityF1
from qkv.metrics.metric import Metric, Scores, Stats
from qkv.metrics.sacrebleu import Bleu
from qkv.metrics.significance import Interval, bootstrap, compare

DRAW = np.random.default_rng(0)
TRUE = [str(x) for x in DRAW.integers(3, size=200)]
GOOD = [t if DRAW.random() < 0.85 else str(DRAW.integers(3)) for t in TRUE]
POOR = [t if DRAW.random() < 0.6 else str(DRAW.integers(3)) for t in TRUE]
TEXTS = [[" ".join(DRAW.choice(list("abcde"), size=8))] for _ in range(40)]
SAID = [" ".join(text[0].split()[: DRAW.integers(3, 9)]) for text in TEXTS]


class OneByOne(Metric[Any, Any]):
    """A metric that computes its scores on every resample anew."""

    name: ClassVar[str] = "slow"
    is_additive = False

    def __init__(self, metric: Metric[Any, Any]) -> None:
        self.metric = metric

    def statistics(self, hypotheses: Any, references: Any) -> Stats:
        return self.metric.statistics(hypotheses, references)

    def score(self, stats: Stats) -> Scores:
        return self.metric.score(stats.sum(0))


@pytest.mark.parametrize(
    ("metric", "predicted", "gold"),
    [
        (Accuracy(), GOOD, TRUE),
        (F1(tuple("012")), GOOD, TRUE),
        (MatthewsCorrelation(tuple("012")), GOOD, TRUE),
        (Bleu(), SAID, TEXTS),
        (EntityF1(("P",)), [["B-P", "O"], ["O", "O"], ["O", "B-P"]], [["B-P", "O"], ["B-P", "O"], ["O", "B-P"]]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_sums_of_counts_give_what_drawing_one_by_one_gives(metric: Any, predicted: Any, gold: Any) -> None:
    rows = metric.statistics(predicted, gold)
    fast, slow = (bootstrap(m, rows, resamples=50, seed=3) for m in (metric, OneByOne(metric)))
    assert fast.keys() == slow.keys() == metric.compute(rows).keys()
    for name in fast:
        assert (fast[name].low, fast[name].high) == pytest.approx((slow[name].low, slow[name].high))
    other = rows.copy()
    other[::2] = rows[-1]
    quick, thorough = (compare(m, rows, other, resamples=50, seed=3) for m in (metric, OneByOne(metric)))
    for name in quick:
        assert quick[name].p_randomization == pytest.approx(thorough[name].p_randomization)
        assert quick[name].p_bootstrap == pytest.approx(thorough[name].p_bootstrap)


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution() -> None:
    metric = Accuracy()
    rows = metric.statistics(GOOD, TRUE)
    mean = metric.compute(rows)["accuracy"]
    half = 1.96 * (mean * (1 - mean) / len(TRUE)) ** 0.5
    result = bootstrap(metric, rows, resamples=4000)["accuracy"]
    assert (result.low, result.high) == pytest.approx((mean - half, mean + half), abs=0.01)
    narrower = bootstrap(metric, rows, resamples=4000, level=0.5)["accuracy"]
    assert result.low < narrower.low < mean < narrower.high < result.high


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    draw, metric, held = np.random.default_rng(1), Accuracy(), 0
    for seed in range(200):
        gold = draw.random(80) < 0.7
        rows = metric.statistics(["a" if r else "b" for r in gold], ["a"] * 80)
        result = bootstrap(metric, rows, resamples=200, seed=seed)["accuracy"]
        held += result.low <= 0.7 <= result.high
    assert 0.88 <= held / 200 <= 0.99


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    metric = F1(tuple("012"))
    rows = metric.statistics(GOOD, TRUE)
    assert bootstrap(metric, rows, seed=1) == bootstrap(metric, rows, seed=1)
    assert bootstrap(metric, rows, seed=1) != bootstrap(metric, rows, seed=2)


def test_the_draws_do_not_depend_on_how_many_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    metric = Accuracy()
    rows = metric.statistics(GOOD, TRUE)
    whole = compare(metric, rows, metric.statistics(POOR, TRUE))
    monkeypatch.setattr("qkv.metrics.significance._MAX_DRAWN_EXAMPLES", 700)
    assert compare(metric, rows, metric.statistics(POOR, TRUE)) == whole


def test_one_example_or_equal_ones_leave_no_doubt() -> None:
    metric = Accuracy()
    assert bootstrap(metric, metric.statistics(["a"], ["a"]))["accuracy"] == Interval(1.0, 1.0)


def test_a_figure_that_is_nowhere_defined_has_no_interval() -> None:
    metric = Spearman()
    result = bootstrap(metric, metric.statistics([1, 1, 1], [1, 2, 3]))["spearman"]
    assert np.isnan([result.low, result.high]).all()


@pytest.mark.parametrize("metric", [Pearson(), Spearman()])
def test_a_correlation_is_resampled_with_its_pairs(metric: Any) -> None:
    truth = DRAW.normal(size=60)
    close, far = truth + 0.1 * DRAW.normal(size=60), truth + 3 * DRAW.normal(size=60)
    rows, other = metric.statistics(close, truth), metric.statistics(far, truth)
    interval = bootstrap(metric, rows, resamples=200)[metric.name]
    assert 0.9 < interval.low < metric.compute(rows)[metric.name] < interval.high < 1
    result = compare(metric, rows, other, resamples=200)[metric.name]
    assert result.p_bootstrap < 0.02
    assert result.p_randomization < 0.02


def test_a_better_system_is_found_better_and_an_equal_one_is_not() -> None:
    metric = F1(tuple("012"))
    good, poor = metric.statistics(GOOD, TRUE), metric.statistics(POOR, TRUE)
    ahead, behind = compare(metric, good, poor)["f1_macro"], compare(metric, poor, good)["f1_macro"]
    assert ahead.difference == -behind.difference > 0
    assert ahead.interval.low > 0
    least = 1 / 1001  # the sample itself is one draw more
    for result in (ahead, behind):
        assert (result.p_bootstrap, result.p_randomization) == pytest.approx((least, least))
    equal = compare(metric, good, good)["f1_macro"]
    assert (equal.difference, equal.p_bootstrap, equal.p_randomization) == (0.0, 1.0, 1.0)


def test_the_test_by_swaps_errs_as_often_as_it_says() -> None:
    """For two equally good systems, p < 0.1 occurs in about a tenth of the samples."""
    draw, metric, false = np.random.default_rng(2), Accuracy(), 0
    for seed in range(200):
        first, second = (["a" if r else "b" for r in draw.random(150) < 0.6] for _ in range(2))
        rows, other = metric.statistics(first, ["a"] * 150), metric.statistics(second, ["a"] * 150)
        false += compare(metric, rows, other, resamples=200, seed=seed)["accuracy"].p_randomization < 0.1
    assert 0.03 <= false / 200 <= 0.17


def test_what_cannot_be_resampled_is_refused() -> None:
    metric = Accuracy()
    rows = metric.statistics(["a"], ["a"])
    with pytest.raises(InputError, match="0 resamples"):
        bootstrap(metric, rows, resamples=0)
    with pytest.raises(InputError, match="level of 95"):
        bootstrap(metric, rows, level=95)
    with pytest.raises(InputError, match="same examples"):
        compare(metric, rows, np.vstack([rows, rows]))
