"""Error rates: Levenshtein distance, the closest of several references, and refused input."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.errors import InputError
from qkv.metrics.error_rate import edit_distance, error_rates

TOKENS = st.lists(st.sampled_from("ABCD"), max_size=9)


@given(TOKENS, TOKENS)
def test_edit_distance_equals_rapidfuzz(a: list[str], b: list[str]) -> None:
    levenshtein = pytest.importorskip("rapidfuzz.distance").Levenshtein
    assert edit_distance(a, b) == levenshtein.distance(a, b)


@given(st.lists(st.tuples(TOKENS, TOKENS.filter(bool)), min_size=1, max_size=10))
def test_token_error_rate_with_one_reference_equals_jiwer(examples: list[tuple[list[str], list[str]]]) -> None:
    jiwer = pytest.importorskip("jiwer")
    predictions = [" ".join(prediction) for prediction, _ in examples]
    references = [" ".join(reference) for _, reference in examples]
    ours = error_rates(predictions, [(reference,) for reference in references])
    assert ours["token_error_rate"] == pytest.approx(jiwer.wer(references, predictions))


@given(TOKENS, TOKENS, TOKENS)
def test_edit_distance_is_a_metric(a: list[str], b: list[str], c: list[str]) -> None:
    assert (edit_distance(a, b) == 0) == (a == b)
    assert edit_distance(a, b) == edit_distance(b, a)
    assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)


@pytest.mark.parametrize(
    ("a", "b", "distance"), [("kitten", "sitting", 3), ("", "abc", 3), ("", "", 0), ("ab", "ba", 2)]
)
def test_edit_distance_of_known_words(a: str, b: str, distance: int) -> None:
    assert edit_distance(a, b) == distance


def test_any_listed_pronunciation_is_right() -> None:
    rates = error_rates(["R IY D", ["R", "EH", "D"]], [("R EH D", "R IY D")] * 2)
    assert rates == {"token_error_rate": 0.0, "sequence_error_rate": 0.0, "examples": 2}


def test_the_closest_reference_sets_the_length_and_the_first_of_equals_wins() -> None:
    closest = error_rates(["A B C"], [("X Y Z W V", "A B D E")])
    assert closest["token_error_rate"] == 2 / 4
    tied = error_rates(["A B"], [("A", "A B C")])
    assert tied["token_error_rate"] == 1 / 1
    assert error_rates(["A B"], [("A B C", "A")])["token_error_rate"] == 1 / 3


def test_rates_are_summed_over_examples_before_dividing() -> None:
    rates = error_rates(["A", "B B B B"], [("X",), ("B B B B",)])
    assert rates == {"token_error_rate": 1 / 5, "sequence_error_rate": 1 / 2, "examples": 2}


def test_an_empty_prediction_counts_as_deletions() -> None:
    assert error_rates([""], [("A B",)]) == {"token_error_rate": 1.0, "sequence_error_rate": 1.0, "examples": 1}


@pytest.mark.parametrize(
    ("predictions", "references", "complaint"),
    [
        ([], [], "no predictions"),
        (["A"], [("A",), ("B",)], "1 predictions and 2"),
        (["A", "B"], [("A",), ()], "example 2"),
        (["A"], ["A"], "example 1"),
        (["A"], [("",)], "every reference is empty"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    predictions: list[str], references: list[tuple[str, ...]], complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        error_rates(predictions, references)
