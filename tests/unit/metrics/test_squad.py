"""SQuAD's rules, checked by hand: normalization, the best of several answers, unanswerable questions."""

from __future__ import annotations

import pytest

from qkv.errors import InputError
from qkv.metrics.squad import Squad, answer_f1, best_threshold, exact_match, normalize_answer


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("The  Cat", "cat"),
        ("an apple, a pear", "apple pear"),
        ("U.S.A.", "usa"),
        ("the-rapist", "therapist"),  # punctuation goes first and leaves no space: no article is left to take
        ("a.b", "ab"),
        ("«1,000»", "«1000»"),  # only ASCII punctuation goes
        ("Theatre a", "theatre"),
        ("The a an", ""),
        ("", ""),
        ("  tabs\tand\nlines ", "tabs and lines"),
        ("état–an", "état–"),  # a dash that stays is a word boundary
    ],
)
def test_normalisation(text: str, left: str) -> None:
    assert normalize_answer(text) == left


@pytest.mark.parametrize(
    ("prediction", "answer", "f1"),
    [
        ("the cat sat", "cat sat on mat", 2 * (2 / 2) * (2 / 4) / (2 / 2 + 2 / 4)),
        ("cat cat", "cat", 2 * (1 / 2) * 1 / (1 / 2 + 1)),  # bags, not sets
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("cat", "", 0.0),
    ],
)
def test_the_overlap_of_words(prediction: str, answer: str, f1: float) -> None:
    assert answer_f1(prediction, answer) == pytest.approx(f1)
    assert answer_f1(prediction, answer, allow_no_answer=False) == pytest.approx(f1)


def test_where_no_words_are_left_only_2_0_calls_them_equal() -> None:
    assert exact_match("the", "a") == 1.0
    assert answer_f1("the", "a") == 1.0
    assert answer_f1("the", "a", allow_no_answer=False) == 0.0
    assert Squad()(["the"], [["a"]]) == {"f1": 0.0, "exact_match": 100.0}
    assert Squad("2.0")(["the"], [["a"]])["f1"] == 100.0
    assert Squad()(["an"], [["the", "cat"]])["exact_match"] == 100.0
    assert Squad("2.0")(["an"], [["the", "cat"]])["exact_match"] == 0.0  # such an answer is not one of several


def test_the_best_answer_counts_for_each_figure_by_itself() -> None:
    scores = Squad()(["Denver Broncos", "x y"], [["the Broncos", "Denver Broncos!", "Denver"], ["y z", "x q r"]])
    assert scores == {"exact_match": pytest.approx(50.0), "f1": pytest.approx(100 * (1 + 0.5) / 2)}


def test_a_missing_prediction_counts_nothing_even_where_an_empty_one_would() -> None:
    assert Squad("2.0")([None, ""], [[], []])["exact_match"] == 50.0


def test_questions_with_and_without_answer_are_also_scored_apart() -> None:
    predictions, answers = ["", "cat", "the dog", ""], [[], [], ["dog", "dogs"], ["mouse"]]
    assert Squad("2.0")(predictions, answers) == {
        "f1": 50.0,
        "exact_match": 50.0,
        "f1_answerable": 50.0,
        "exact_match_answerable": 50.0,
        "f1_unanswerable": 50.0,
        "exact_match_unanswerable": 50.0,
    }
    assert set(Squad("2.0")(["cat"], [["cat"]])) == {"f1", "exact_match", "f1_answerable", "exact_match_answerable"}


def test_an_answer_of_articles_only_is_none_but_its_question_stays_answerable() -> None:
    assert Squad("2.0")([""], [["the"]]) == dict.fromkeys(
        ("f1", "exact_match", "f1_answerable", "exact_match_answerable"), 100.0
    )


def test_the_best_threshold_answers_what_is_worth_it() -> None:
    scores = {"sure": 1.0, "half": 0.5, "none": 0.0, "silent": 1.0}  # `none` got an answer where there is none
    answerable = {"sure": True, "half": True, "none": False, "silent": False}
    no_answer = {"sure": 0.1, "half": 0.2, "none": 0.8, "silent": 0.9}
    # two points for answering none; +1 for sure, +0.5 for half, −1 for none, 0 for silent
    assert best_threshold(scores, answerable, no_answer) == (pytest.approx(100 * 3.5 / 4), 0.2)
    refused = {"half": 0.1, "none": 0.05}  # answering up to `half` loses more than it gains
    assert best_threshold({"half": 0.5, "none": 0.0}, answerable, refused) == (50.0, 0.0)


def test_predictions_and_questions_must_be_as_many() -> None:
    with pytest.raises(InputError, match="2 hypotheses and 1 references"):
        Squad()(["a", "b"], [["a"]])


def test_a_question_without_answers_is_none_of_squad_1() -> None:
    with pytest.raises(InputError, match=r"question 2 has no answer.*squad2"):
        Squad()(["cat", ""], [["cat"], []])
