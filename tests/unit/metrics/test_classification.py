"""Metrics of labels: scores computed by hand, edge cases, invalid input; the parity tests compare with scikit-learn."""

from __future__ import annotations

import pytest

from qkv.errors import InputError
from qkv.metrics.classification import (
    F1,
    Accuracy,
    MatthewsCorrelation,
    TokenAccuracy,
    collect_label_set,
    confusion_matrix,
)
from qkv.metrics.correlation import Spearman
from qkv.metrics.perplexity import Perplexity


def test_the_three_averages_of_a_small_table() -> None:
    predicted, true = list("aaab"), list("aabb")  # a: 2 of 3 right, 2 of 2 found; b: 1 of 1 right, 1 of 2 found
    result = F1(("a", "b"))(predicted, true)
    assert result["precision_macro"] == pytest.approx((2 / 3 + 1) / 2)
    assert result["recall_macro"] == pytest.approx((1 + 1 / 2) / 2)
    assert result["f1_macro"] == pytest.approx((4 / 5 + 2 / 3) / 2)
    assert result["f1_micro"] == pytest.approx(3 / 4)
    assert next(iter(result)) == "f1_macro"
    assert next(iter(F1(("a", "b"), "micro")(predicted, true))) == "f1_micro"


def test_one_class_only() -> None:
    assert set(F1(("a",))(["a"] * 3, ["a"] * 3).values()) == {1.0}
    assert MatthewsCorrelation(("a",))(["a"] * 3, ["a"] * 3) == {"matthews_correlation": 0.0}
    assert MatthewsCorrelation(("a", "b"))(list("aab"), list("aab"))["matthews_correlation"] == pytest.approx(1)
    assert MatthewsCorrelation(("a", "b"))(list("bba"), list("aab"))["matthews_correlation"] == pytest.approx(-1)


def test_a_label_that_does_not_count_is_passed_over() -> None:
    result = F1(("N",))([["O", "N"], ["O", "O"]], [["O", "N"], ["N", "O"]])
    assert (result["precision_micro"], result["recall_micro"]) == (1.0, 0.5)


def test_an_empty_set_of_labels_that_is_right_is_right() -> None:
    empty: frozenset[str] = frozenset()
    assert Accuracy()([empty, {"a"}], [empty, {"a", "b"}]) == {"accuracy": 0.5}
    assert set(F1(("a",))([empty], [empty]).values()) == {0.0}


def test_sequences_are_right_as_a_whole_or_by_token() -> None:
    predicted, true = [["N", "V"], ["N"]], [["N", "N"], ["N"]]
    assert Accuracy()(predicted, true)["accuracy"] == 0.5
    assert TokenAccuracy()(predicted, true)["accuracy"] == pytest.approx(2 / 3)


def test_every_label_that_occurs_is_found() -> None:
    assert collect_label_set(["b", "a"], [["c", "a"]], [{"d"}]) == ("a", "b", "c", "d")


def test_the_confusion_matrix_has_truth_down_and_prediction_across() -> None:
    assert confusion_matrix(list("aab"), list("abb"), "ab").tolist() == [[1, 0], [1, 1]]
    with pytest.raises(InputError, match="'c'"):
        confusion_matrix(["c"], ["a"], "ab")


def test_perplexity_divides_sums_once() -> None:
    result = Perplexity()([2.0, 0.0, 4.0], [1, 0, 5])
    assert result["nats_per_token"] == pytest.approx(1.0)
    assert result["perplexity"] == pytest.approx(2.718281828)
    assert result["bits_per_token"] == pytest.approx(1.442695)
    assert Perplexity()([1e9], [1])["perplexity"] == float("inf")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Accuracy()([], []), "no hypotheses"),
        (lambda: Accuracy()(["a"], ["a", "b"]), "1 hypotheses and 2 references"),
        (lambda: TokenAccuracy()([["a"]], [["a", "b"]]), "example 1: 1 predicted labels for 2 tokens"),
        (lambda: F1(("a",))([["a"]], [["a", "b"]]), "1 predicted labels for a sequence of 2"),
        (lambda: Spearman()([1.0], [1.0]), "two examples"),
        (lambda: Spearman()([1.0, float("nan")], [1.0, 2.0]), "example 2"),
        (lambda: Perplexity()([1.0], [0]), "all counts are 0"),
        (lambda: Perplexity()([float("inf")], [1]), "example 1"),
        (lambda: Spearman().per_example(Spearman().statistics([1.0, 2.0], [1.0, 2.0])), "a score of a sample"),
    ],
)
def test_what_cannot_be_scored_is_refused(call: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()  # type: ignore[operator]
