"""Descriptions of predictions: probabilities, and positions in the text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))
from task_models import CASES, learn, model

from qkv.errors import InputError
from qkv.tasks import get_task
from qkv.tasks.base import predict


def learned(name: str, length: int = 48) -> tuple[Any, Any, list[Any]]:
    """A task, a model that knows its examples, and these."""
    case = CASES[name]
    task = case.make()
    bundle = model(task, task.labels(case.examples), length)
    learn(task, bundle, case.examples, case.steps)
    return task, bundle, case.examples


@pytest.mark.parametrize("name", CASES)
def test_every_task_says_what_its_metrics_take_and_how_sure_it_is(name: str) -> None:
    case = CASES[name]
    task = case.make()
    bundle = model(task, task.labels(case.examples))
    asked = (
        [example.without_label() for example in case.examples]
        if name != "text_classification marked"
        else case.examples
    )
    said = task.predict(bundle, asked, n_best=3)
    assert [one.prediction for one in said] == predict(task, bundle, asked)
    for one in said:
        assert one.probability is None if task.name == "regression" else 0 <= one.probability <= 1
        assert isinstance(one.text, str)
        assert one.fields


def test_entities_stand_where_their_characters_are() -> None:
    task, bundle, examples = learned("token_classification")
    found = [entity for one, example in zip(task.predict(bundle, examples), examples, strict=True)
             for entity in _checked(one.fields["entities"], example.text)]  # fmt: skip
    assert {entity["type"] for entity in found} == {"PER", "LOC"}
    assert all(0 < entity["probability"] <= 1 for entity in found)


def _checked(entities: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    assert all(text[one["start"] : one["end"]] == one["text"] for one in entities)
    return entities


def test_tags_that_are_no_chunks_are_told_word_by_word() -> None:
    task, bundle, examples = learned("token_classification parts of speech")
    told = task.predict(bundle, examples[:1])[0].fields
    assert [word["tag"] for word in told["words"]] == list(examples[0].tags)
    assert "entities" not in told


def test_the_confidence_in_a_wrong_sentence_is_that_of_its_surest_wrong_word() -> None:
    task, bundle, examples = learned("token_classification")
    one = task.predict(bundle, examples[:1])[0]
    truth = list(one.prediction)
    assert one.error_probability(truth) == one.probability
    truth[2] = "another"
    assert one.error_probability(truth) == one.word_probs[2]


@pytest.mark.parametrize("name", ["question_answering", "question_answering windows"])
def test_answers_stand_where_their_characters_are(name: str) -> None:
    task, bundle, examples = learned(name)
    for one, example in zip(task.predict(bundle, examples, n_best=3), examples, strict=True):
        for told in [one.fields, *one.fields["answers"]]:
            assert example.context[told["start"] : told["end"]] == told["answer"] != ""
        chances = [told["probability"] for told in one.fields["answers"]]
        assert chances == sorted(chances, reverse=True)
        assert one.span == (one.fields["start"], one.fields["end"])


def test_where_questions_may_have_no_answer_the_score_for_that_decides() -> None:
    task, bundle, examples = learned("question_answering or none")
    truths = [task.gold(example) for example in examples]
    said = task.predictions_for_scoring(task.predict(bundle, examples), truths)
    for one in said:
        nothing = one.fields["null_score_diff"] > 0
        assert (one.fields["answer"] == "") == nothing == (one.span is None)
    assert any(one.fields["answer"] == "" for one in said)
    assert all(
        one.fields["answer"]
        for one in task.predictions_for_scoring(task.predict(bundle, examples), ["an answer"] * len(examples))
    )


def test_the_probabilities_of_options_are_in_their_order() -> None:
    task, bundle, examples = learned("multiple_choice")
    for one, example in zip(task.predict(bundle, examples, n_best=2), examples, strict=True):
        chances = one.fields["probabilities"]
        assert len(chances) == len(example.choices)
        assert sum(chances) == pytest.approx(1)
        assert one.fields["choice"] == chances.index(max(chances))
        assert one.text == example.choices[one.fields["choice"]]


def test_a_tab_in_a_text_that_is_tagged_is_white_space() -> None:
    assert get_task("token_classification").parse_line("New\tYork", "file:3").words == ("New", "York")


def test_a_task_that_learned_pairs_takes_two_texts_and_one_that_did_not_takes_one() -> None:
    one, two = (get_task("text_classification", text_pairs=pairs) for pairs in (False, True))
    assert (one.parse_line("a\tb", "file:3").text, one.parse_line("a\tb", "file:3").text_pair) == ("a\tb", None)
    assert two.parse_line("a\tb", "file:3").text_pair == "b"
    with pytest.raises(InputError, match="file:3: this model takes two texts"):
        two.parse_line("a", "file:3")


@pytest.mark.parametrize(
    ("task", "line", "said"),
    [
        ("text_classification", "a\tb\tc", "one text or two, not 3"),
        ("question_answering", "a question", "a question and a text"),
        ("multiple_choice", "a text", "a text and its choices"),
        ("regression", "a\t ", "is empty"),
    ],
)
def test_a_line_that_is_no_example_is_named(task: str, line: str, said: str) -> None:
    with pytest.raises(InputError, match=f"file:3: .*{said}"):
        get_task(task).parse_line(line, "file:3")


@pytest.mark.parametrize(
    ("task", "line"),
    [
        ("text_classification", "a\tb"),
        ("regression", "a b"),
        ("token_classification", "Ann, here."),
        ("question_answering", "a\tb"),
        ("multiple_choice", "a\tb\tc"),
    ],
)
def test_a_line_is_an_example_and_back(task: str, line: str) -> None:
    assert get_task(task).parse_line(line, "").to_line() == line
