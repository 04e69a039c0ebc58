"""F1 of one class, and exact match over groups."""

from __future__ import annotations

import pytest
from sklearn.metrics import f1_score, precision_score, recall_score

from qkv.evaluate.benchmarks import GroupExact, Member, PositiveF1


def test_f1_of_the_positive_class_equals_scikit_learns() -> None:
    said, right = list("yynnyny"), list("ynnyyyy")
    found = PositiveF1(("y",))(said, right)
    for name, theirs in (("f1", f1_score), ("precision", precision_score), ("recall", recall_score)):
        assert found[name] == pytest.approx(theirs(right, said, pos_label="y"))
    assert PositiveF1(("y",))(["n"], ["n"])["f1"] == 0.0


def test_a_group_is_right_where_all_of_it_is() -> None:
    right = [Member.of("yes", group) for group in ("a", "a", "b", "b", "c")]
    assert GroupExact()(["yes", "no", "yes", "yes", "yes"], right)["exact"] == pytest.approx(2 / 3)
    assert right[0] == "yes"
