"""A report lists the errors of a model, and its page shows all data as plain text."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from qkv.data.examples import Answer, MultipleChoiceExample, QAExample, TaggedExample, TextExample
from qkv.errors import InputError
from qkv.metrics.classification import F1, Accuracy, MatthewsCorrelation, TokenAccuracy
from qkv.metrics.correlation import Pearson
from qkv.metrics.squad import Squad
from qkv.reports.error_analysis import ScoredExample, error_size, make_case
from qkv.reports.html import render_html
from qkv.reports.report import (
    Report,
    build_report,
    headline_metrics,
    make_confusion_matrix,
    read_learning_curves,
    to_dict,
)

NASTY = "<script>alert('x')</script> & \"quoted\" 😀 \u202e עברית </pre></details>" + "Donaudampfschiff" * 40
LABELS = ("cat", "dog", "<b>emu</b>")


def scored(prediction: str, gold: str, confidence: float | None = 0.9, text: str = "a text") -> ScoredExample:
    return ScoredExample(TextExample(text, "file:1", label=gold), prediction, gold, confidence)


def classified(*examples: ScoredExample, **options: Any) -> Report:
    metrics = [Accuracy(), F1(LABELS), MatthewsCorrelation(LABELS)]
    return build_report("text_classification", examples, metrics, LABELS, "accuracy", **{"resamples": 50, **options})


class _Tags(HTMLParser):
    """The elements of a page, its links, and errors such as an element that is not closed."""

    VOID = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]
        self.wrong += [name for name, _ in attrs if name.startswith("on")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self.names.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}>")


# ---- content ---------------------------------------------------------------------------------------------------


def test_the_deciding_figure_comes_first_and_lies_in_its_interval() -> None:
    examples = [scored("cat", "cat"), scored("cat", "dog"), scored("dog", "dog"), scored("dog", "dog")] * 5
    result = build_report(
        "text_classification",
        examples,
        [Accuracy(), MatthewsCorrelation(LABELS)],
        LABELS,
        "matthews_correlation",
        resamples=200,
    )
    assert list(result.metrics) == ["matthews_correlation", "accuracy"]
    assert result.metrics["accuracy"].value == 0.75
    for score in result.metrics.values():
        assert score.ci_low is not None
        assert score.ci_high is not None
        assert score.ci_low < score.value < score.ci_high


def test_a_deciding_figure_that_no_metric_has_is_named() -> None:
    with pytest.raises(InputError, match="'acuracy'; did you mean 'accuracy'"):
        build_report("text_classification", [scored("cat", "cat")], [Accuracy()], LABELS, "acuracy", resamples=0)


def test_the_surest_mistake_comes_first() -> None:
    examples = [scored("cat", "dog", 0.4), scored("cat", "dog", 0.99), scored("dog", "dog", 1.0), scored("cat", "dog")]
    result = classified(*examples)
    assert [item.confidence for item in result.worst_examples] == [0.99, 0.9, 0.4]
    assert result.num_wrong == 3


def test_of_numbers_the_farthest_comes_first() -> None:
    pairs = [(1.0, 1.5), (2.0, 5.0), (3.0, 3.0), (4.0, 4.25)]
    examples = [
        ScoredExample(TextExample("t", f"file:{gold}", label=gold), prediction, gold) for prediction, gold in pairs
    ]
    result = build_report("regression", examples, [Pearson()], (), "pearson", resamples=0)
    assert [item.location for item in result.worst_examples] == ["file:5.0", "file:1.5", "file:4.25"]


def test_classes_are_listed_from_the_lowest_f1_and_those_without_examples_last() -> None:
    result = classified(scored("cat", "cat"), scored("cat", "dog"), scored("dog", "dog"), scored("dog", "dog"))
    assert [label for label, _ in result.worst_classes()] == ["cat", "dog", "<b>emu</b>"]


def test_confusions_count_what_was_taken_for_what() -> None:
    result = make_confusion_matrix(["cat", "cat", "dog"], ["dog", "dog", "dog"], LABELS)
    assert result is not None
    assert result.labels == ("cat", "dog")
    assert result.mistakes() == [("dog", "cat", 2)]
    assert result.support == (0, 3)


def test_confusions_of_tags_are_those_of_all_words() -> None:
    result = make_confusion_matrix([("O", "B"), ("O",)], [("O", "O"), ("B",)], ("B", "O"))
    assert result is not None
    assert result.mistakes() == [("B", "O", 1), ("O", "B", 1)]


@pytest.mark.parametrize(
    ("prediction", "gold"),
    [([1.0], [2.0]), ([frozenset("a")], [frozenset("b")]), ([1], [0]), (["Paris"], [("Paris", "in Paris")])],
)
def test_what_is_not_one_of_several_labels_has_no_confusions(prediction: list[Any], gold: list[Any]) -> None:
    assert make_confusion_matrix(prediction, gold, ("a", "b")) is None


def test_of_many_classes_those_without_mistakes_are_left_out() -> None:
    labels = tuple(f"label {i}" for i in range(40))
    prediction = [*labels, "label 1", "label 2"]
    gold = [*labels, "label 0", "label 0"]
    result = make_confusion_matrix(prediction, gold, labels)
    assert result is not None
    assert result.most_confused(30).labels == ("label 0", "label 1", "label 2")
    assert result.most_confused(30).support == (3, 1, 1)
    assert result.most_confused(1).labels == ("label 0",)


def test_examples_without_labels_are_counted_and_nothing_is_scored() -> None:
    result = classified(num_unlabeled=3)
    assert (result.num_examples, result.num_unlabeled, result.metrics) == (0, 3, {})
    assert "3 further examples have no label" in render_html(result)


# ---- how wrong, and where -------------------------------------------------------------------------------------------


def test_an_answer_is_as_wrong_as_its_words_are_other_words() -> None:
    question = QAExample("1", "Where?", "It is in Paris now", (Answer("Paris", 9),), "f:1")
    assert error_size(ScoredExample(question, "paris", ("Paris",))) == 0
    assert error_size(ScoredExample(question, "in Paris", ("Paris",))) == pytest.approx(1 / 3)
    assert error_size(ScoredExample(question, "", ("Paris",))) == 1
    nowhere = QAExample("1", "Where?", "It is", (), "f:1", answerable=False)
    assert error_size(ScoredExample(nowhere, "", ())) == 0
    assert error_size(ScoredExample(nowhere, "It", ())) == 1


def test_overlapping_spans_are_marked_apart_and_the_text_stays_whole() -> None:
    question = QAExample("1", "Where?", "It is in Paris, France now", (Answer("Paris", 9),), "f:1")
    case = make_case(ScoredExample(question, "in Paris, France", ("Paris",), 0.5, (6, 22)))
    assert "".join(piece.text for piece in case.lines[1]) == question.context
    marks = [(piece.text, piece.kind) for piece in case.lines[1] if piece.kind]
    assert marks == [("in ", "wrong"), ("Paris", "correct"), (", France", "wrong")]


def test_tags_are_marked_word_by_word_and_the_text_stays_whole() -> None:
    example = TaggedExample("Bob saw  Ann.", ("Bob", "saw", "Ann", "."), (0, 4, 9, 12), ("B", "O", "B", "O"), "f:1")
    case = make_case(ScoredExample(example, ("B", "B", "O", "O"), example.tags, 0.5))
    assert "".join(piece.text for piece in case.lines[0]) == example.text
    marks = {piece.text: (piece.kind, piece.note) for piece in case.lines[0] if piece.kind}
    assert marks == {"Bob": ("correct", "B"), "saw": ("wrong", "B, not O"), "Ann": ("missed", "O, not B")}


def test_the_option_that_was_chosen_and_the_right_one_are_marked() -> None:
    case = make_case(ScoredExample(MultipleChoiceExample("What?", ("a", "b", "c"), 1, "f:1"), 2, 1, 0.5))
    assert [line[-1].kind for line in case.lines] == ["", "", "missed", "wrong"]
    assert (case.predicted, case.gold) == ("3: c", "2: b")


# ---- the page -------------------------------------------------------------------------------------------------------


def nasty() -> Report:
    from dataclasses import replace

    result = classified(scored("cat", "<b>emu</b>", text=NASTY), scored("dog", "dog"))
    curve = {"loss": [(10, 2.0), (20, 1.5)], "accuracy": [(20, 0.5)]}
    return replace(result, run=NASTY, data=NASTY, recipe=f"name: {NASTY}", notes=(NASTY,), learning_curves=curve)


def test_nothing_in_the_data_becomes_a_part_of_the_page() -> None:
    text = render_html(nasty())
    tags = _Tags(text)
    assert tags.names.count("script") == 1
    assert "b" in tags.names  # the page has its own, but not the label's
    assert "<b>emu" not in text
    assert tags.wrong == []
    assert tags.open == []


def test_a_page_needs_nothing_but_itself() -> None:
    text = render_html(nasty())
    assert _Tags(text).links == []
    assert "http" not in text
    assert "@import" not in text
    assert "url(" not in text


def test_a_page_is_for_phones_and_for_dark_rooms() -> None:
    text = render_html(nasty())
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text


def test_every_kind_of_example_has_its_page() -> None:
    question = QAExample("1", NASTY, NASTY, (Answer("quoted", NASTY.index("quoted")),), NASTY)
    tagged = TaggedExample("Bob saw", ("Bob", "saw"), (0, 4), ("B", "O"), NASTY)
    several = TextExample(NASTY, "f:1", label=("a",))
    for metric, example, prediction, gold in [
        (Squad(), question, "alert", ("quoted",)),
        (TokenAccuracy(), tagged, ("O", "O"), ("B", "O")),
        (Accuracy(), MultipleChoiceExample(NASTY, (NASTY, "b"), 0, "f:1"), 1, 0),
        (Accuracy(), several, frozenset(), frozenset("a")),
    ]:
        result = build_report(
            "task", [ScoredExample(example, prediction, gold, 0.5)], [metric], ("B", "O"), _first(metric), resamples=0
        )
        tags = _Tags(render_html(result))
        assert (tags.wrong, tags.open, tags.names.count("script")) == ([], [], 1)
        assert result.num_wrong == 1


def _first(metric: Any) -> str:
    return {"squad": "f1"}.get(metric.name, "accuracy")


# ---- the log, and JSON ----------------------------------------------------------------------------------------------


def test_curves_come_from_the_log_whatever_a_kill_left_of_it(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    lines = [
        {"kind": "note", "step": 0},
        {"kind": "train", "step": 5, "loss": 2.0},
        {"kind": "train", "step": 10, "loss": math.nan},
        {"kind": "valid", "step": 10, "accuracy": 0.5, "f1": 0.1},
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tra')
    assert read_learning_curves(log, "accuracy") == {"loss": [(5, 2.0)], "accuracy": [(10, 0.5)]}
    assert read_learning_curves(tmp_path / "gone.jsonl", "accuracy") == {}


def test_json_has_no_word_for_not_a_number() -> None:
    examples = [ScoredExample(TextExample("t", "f:1", label=1.0), 1.0, 1.0)] * 3
    result = build_report("regression", examples, [Pearson()], (), "pearson", resamples=10)
    reported = json.loads(json.dumps(to_dict(result), allow_nan=False))
    assert reported["metrics"]["pearson"] == {"value": None, "ci_low": None, "ci_high": None}
    assert "undefined" in render_html(result)


def test_json_has_all_of_it() -> None:
    reported = to_dict(nasty())
    assert reported["worst_examples"][0]["lines"][0][0]["text"] == NASTY[:1200]
    assert reported["confusions"] == [{"gold": "<b>emu</b>", "predicted": "cat", "count": 1}]
    assert reported["learning_curves"]["loss"] == [[10, 2.0], [20, 1.5]]


@pytest.mark.parametrize(
    ("names", "selected"),
    [
        (
            "accuracy f1_macro precision_macro recall_macro f1_micro recall_micro f1_weighted matthews_correlation",
            "accuracy f1_macro matthews_correlation",
        ),
        (
            "f1_micro precision_micro recall_micro f1_macro recall_macro accuracy",
            "f1_micro precision_micro recall_micro accuracy",
        ),
        (
            "recall_macro accuracy f1_macro f1_micro matthews_correlation",
            "recall_macro accuracy f1_macro matthews_correlation",
        ),
        ("token_error_rate sequence_error_rate", "token_error_rate sequence_error_rate"),
    ],
)
def test_a_person_sees_one_average_of_each_figure_first(names: str, selected: str) -> None:
    assert headline_metrics(names.split()) == selected.split()
