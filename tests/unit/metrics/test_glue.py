"""F1 of one class, and exact match over groups."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import f1_score, precision_score, recall_score

from qkv.errors import InputError
from qkv.metrics.glue import GroupedLabel, GroupExactMatch, PositiveF1
from qkv.metrics.significance import bootstrap, compare


def test_f1_of_the_positive_class_equals_scikit_learns() -> None:
    predicted, gold = list("yynnyny"), list("ynnyyyy")
    result = PositiveF1(("y",))(predicted, gold)
    for name, theirs in (("f1", f1_score), ("precision", precision_score), ("recall", recall_score)):
        assert result[name] == pytest.approx(theirs(gold, predicted, pos_label="y"))
    assert PositiveF1(("y",))(["n"], ["n"])["f1"] == 0.0


def test_a_group_is_right_where_all_of_it_is() -> None:
    gold = [GroupedLabel.create("yes", group) for group in ("a", "a", "b", "b", "c")]
    assert GroupExactMatch()(["yes", "no", "yes", "yes", "yes"], gold)["exact_match"] == pytest.approx(2 / 3)
    assert gold[0] == "yes"


def test_resamples_and_swaps_are_of_whole_groups() -> None:
    draw = np.random.default_rng(1)
    gold = [GroupedLabel.create("yes", str(number // 5)) for number in range(1000)]
    systems = [["yes" if good else "no" for good in draw.random(1000) < share] for share in (0.75, 0.9)]
    metric = GroupExactMatch()
    rows, other = (metric.statistics(predicted, gold) for predicted in systems)
    share = metric.compute(rows)["exact_match"]
    interval = bootstrap(metric, rows)["exact_match"]
    assert interval.low < share < interval.high
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * (share * (1 - share) / 200) ** 0.5, rel=0.25)
    assert compare(metric, rows, other)["exact_match"].p_randomization < 0.01
    with pytest.raises(InputError, match="a score of groups"):
        metric.per_example(rows)
