"""What a model says of an example beside the plain prediction: probabilities, and places in its text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))
from task_models import CASES, learn, model

from qkv.errors import InputError
from qkv.reports.report import strip_label
from qkv.tasks import get_task
from qkv.tasks.base import predict
from qkv.tasks.predictions import apply_null_threshold, format_example, parse_example, predict_detailed


def learned(name: str, length: int = 48) -> tuple[Any, Any, list[Any]]:
    """A task, a model that knows its examples, and these."""
    case = CASES[name]
    task = case.make()
    loaded = model(task, task.labels(case.examples), length)
    learn(task, loaded, case.examples, case.steps)
    return task, loaded, case.examples


@pytest.mark.parametrize("name", CASES)
def test_every_task_says_what_its_metrics_take_and_how_sure_it_is(name: str) -> None:
    case = CASES[name]
    task = case.make()
    loaded = model(task, task.labels(case.examples))
    asked = [strip_label(example) for example in case.examples] if name != "classify marked" else case.examples
    said = predict_detailed(task, loaded, asked, n_best=3)
    assert [one.prediction for one in said] == predict(task, loaded, asked)
    for one in said:
        assert one.confidence is None if task.name == "rate" else 0 <= one.confidence <= 1
        assert isinstance(one.text, str)
        assert one.fields


def test_entities_stand_where_their_characters_are() -> None:
    task, loaded, examples = learned("tag")
    found = [entity for one, example in zip(predict_detailed(task, loaded, examples), examples, strict=True)
             for entity in _checked(one.fields["entities"], example.text)]  # fmt: skip
    assert {entity["type"] for entity in found} == {"PER", "LOC"}
    assert all(0 < entity["probability"] <= 1 for entity in found)


def _checked(entities: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    assert all(text[one["begin"] : one["end"]] == one["text"] for one in entities)
    return entities


def test_tags_that_are_no_chunks_are_told_word_by_word() -> None:
    task, loaded, examples = learned("tag parts of speech")
    told = predict_detailed(task, loaded, examples[:1])[0].fields
    assert [word["tag"] for word in told["words"]] == list(examples[0].tags)
    assert "entities" not in told


def test_the_confidence_in_a_wrong_sentence_is_that_of_its_surest_wrong_word() -> None:
    task, loaded, examples = learned("tag")
    one = predict_detailed(task, loaded, examples[:1])[0]
    truth = list(one.prediction)
    assert one.error_confidence(truth) == one.confidence
    truth[2] = "another"
    assert one.error_confidence(truth) == one.word_probs[2]


@pytest.mark.parametrize("name", ["answer", "answer windows"])
def test_answers_stand_where_their_characters_are(name: str) -> None:
    task, loaded, examples = learned(name)
    for one, example in zip(predict_detailed(task, loaded, examples, n_best=3), examples, strict=True):
        for told in [one.fields, *one.fields["answers"]]:
            assert example.context[told["begin"] : told["end"]] == told["answer"] != ""
        chances = [told["probability"] for told in one.fields["answers"]]
        assert chances == sorted(chances, reverse=True)
        assert one.span == (one.fields["begin"], one.fields["end"])


def test_where_questions_may_have_no_answer_the_score_for_that_decides() -> None:
    task, loaded, examples = learned("answer or none")
    truths = [task.truth(example) for example in examples]
    said = apply_null_threshold(task, predict_detailed(task, loaded, examples), truths)
    for one in said:
        nothing = one.fields["no_answer"] > 0
        assert (one.fields["answer"] == "") == nothing == (one.span is None)
    assert any(one.fields["answer"] == "" for one in said)
    assert all(one.fields["answer"] for one in apply_null_threshold(task, predict_detailed(task, loaded, examples), ["an answer"] * len(examples)))


def test_the_probabilities_of_options_are_in_their_order() -> None:
    task, loaded, examples = learned("choose")
    for one, example in zip(predict_detailed(task, loaded, examples, n_best=2), examples, strict=True):
        chances = one.fields["probabilities"]
        assert len(chances) == len(example.options)
        assert sum(chances) == pytest.approx(1)
        assert one.fields["choice"] == chances.index(max(chances))
        assert one.text == example.options[one.fields["choice"]]


def test_a_tab_in_a_text_that_is_tagged_is_white_space() -> None:
    assert parse_example(get_task("tag"), "New\tYork", "file:3").words == ("New", "York")


def test_a_task_that_learned_pairs_takes_two_texts_and_one_that_did_not_takes_one() -> None:
    one, two = (get_task("classify", pairs=pairs) for pairs in (False, True))
    assert (parse_example(one, "a\tb", "file:3").text, parse_example(one, "a\tb", "file:3").second) == ("a\tb", None)
    assert parse_example(two, "a\tb", "file:3").second == "b"
    with pytest.raises(InputError, match="file:3: this model takes two texts"):
        parse_example(two, "a", "file:3")


@pytest.mark.parametrize(
    ("task", "line", "said"),
    [
        ("classify", "a\tb\tc", "one text or two, not 3"),
        ("answer", "a question", "a question and a text"),
        ("choose", "a text", "a text and its choices"),
        ("rate", "a\t ", "is empty"),
    ],
)
def test_a_line_that_is_no_example_is_named(task: str, line: str, said: str) -> None:
    with pytest.raises(InputError, match=f"file:3: .*{said}"):
        parse_example(get_task(task), line, "file:3")


@pytest.mark.parametrize(
    ("task", "line"),
    [("classify", "a\tb"), ("rate", "a b"), ("tag", "Ann, here."), ("answer", "a\tb"), ("choose", "a\tb\tc")],
)
def test_a_line_is_an_example_and_back(task: str, line: str) -> None:
    assert format_example(parse_example(get_task(task), line, "")) == line
