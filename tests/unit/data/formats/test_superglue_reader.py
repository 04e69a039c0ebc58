"""SuperGLUE's records, each as the example that its metric needs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from task_files import json_lines, refused

from qkv.data.examples import Answer, MultipleChoiceExample, QAExample, TextExample
from qkv.data.formats import FORMATS, read
from qkv.data.formats.superglue import PLACEHOLDER, TASKS

PAIR = {"premise": "It rained.", "hypothesis": "It was wet.", "label": "entailment", "idx": 3}
COPA = {"premise": "I fell.", "choice1": "Ice.", "choice2": "Fire.", "question": "cause", "label": 0, "idx": 0}
MULTIRC = {
    "idx": 5,
    "version": 1.1,
    "passage": {
        "text": "Sarah lost her tooth.",
        "questions": [
            {
                "question": "Who?",
                "answers": [{"text": "Sarah", "idx": 0, "label": 1}, {"text": "Bob", "idx": 1, "label": 0}],
                "idx": 8,
            },
            {"question": "What?", "answers": [{"text": "A tooth", "idx": 2, "label": 1}], "idx": 9},
        ],
    },
}
RECORD = {
    "source": "Daily mail",
    "passage": {
        "text": "Bo met Al.\n@highlight\nAl left",
        "entities": [{"start": 0, "end": 1}, {"start": 7, "end": 8}],
    },
    "idx": 1,
    "qas": [{"query": "@placeholder left the room.", "answers": [{"start": 7, "end": 8, "text": "Al"}], "idx": 4}],
}
WIC = {"word": "place", "sentence1": "Take your places.", "sentence2": "A quiet place.", "idx": 0, "label": False}
WIC |= {"start1": 10, "end1": 16, "start2": 8, "end2": 13, "version": 1.1}
WSC = {
    "text": "Mark told Pete many lies about himself. He should have been more skeptical.",
    "target": {"span2_index": 7, "span1_index": 0, "span1_text": "Mark", "span2_text": "He"},
    "idx": 0,
    "label": False,
}
RECORDS: dict[str, dict[str, Any]] = {
    "BoolQ": {"question": "is it", "passage": "It is.", "idx": 0, "label": True},
    "CB": {**PAIR, "label": "neutral"},
    "COPA": COPA,
    "MultiRC": MULTIRC,
    "ReCoRD": RECORD,
    "RTE": PAIR,
    "WiC": WIC,
    "WSC": WSC,
    "AX-b": {"sentence1": "A.", "sentence2": "B.", "idx": 0, "label": "not_entailment", "logic": "Negation"},
    "AX-g": {**PAIR, "pair_id": 213},
}


def one(tmp_path: Path, task: str, record: dict[str, Any]) -> Any:
    (example,) = read(f"superglue:{task}", json_lines(tmp_path / "train.jsonl", record))
    return example


@pytest.mark.parametrize("task", TASKS)
def test_each_task_is_found_in_the_folder_of_all_and_gives_its_kind(tmp_path: Path, task: str) -> None:
    part, name = ("test", task) if task.startswith("AX") else ("dev", "val")
    path = json_lines(tmp_path / task / f"{name}.jsonl", RECORDS[task])
    examples = read(f"superglue:{task}", tmp_path, split=part)
    assert {type(example) for example in examples} == {FORMATS.get(f"superglue:{task}").example_type}
    assert {example.location for example in examples} == {f"{path}:1"}


def test_pairs_have_their_label_in_words_and_ax_g_its_pair(tmp_path: Path) -> None:
    where = f"{tmp_path / 'train.jsonl'}:1"
    assert one(tmp_path, "RTE", PAIR) == TextExample("It rained.", where, "It was wet.", "entailment", id="3")
    assert one(tmp_path, "BoolQ", RECORDS["BoolQ"]) == TextExample("is it", where, "It is.", "true", id="0")
    assert one(tmp_path, "AX-g", RECORDS["AX-g"]).group == "213"


def test_copa_is_a_choice_of_two(tmp_path: Path) -> None:
    where = f"{tmp_path / 'train.jsonl'}:1"
    assert one(tmp_path, "COPA", COPA) == MultipleChoiceExample("I fell.", ("Ice.", "Fire."), 0, where, "cause", "0")


def test_multirc_groups_the_answers_of_a_question(tmp_path: Path) -> None:
    examples = read("superglue:MultiRC", json_lines(tmp_path / "train.jsonl", MULTIRC))
    assert [(example.text_pair, example.label, example.group, example.id) for example in examples] == [
        ("Who? Sarah", "true", "5:8", "5:8:0"),
        ("Who? Bob", "false", "5:8", "5:8:1"),
        ("What? A tooth", "true", "5:9", "5:9:2"),
    ]


def test_record_counts_the_last_character_of_an_entity_in(tmp_path: Path) -> None:
    asked = one(tmp_path, "ReCoRD", RECORD)
    assert isinstance(asked, QAExample)
    assert asked.answers == (Answer("Al", 7),)
    assert asked.candidates == (Answer("Bo", 0), Answer("Al", 7))
    assert (asked.id, asked.question.replace(PLACEHOLDER, "Al")) == ("1:4", "Al left the room.")


def _span_text(example: Any, span: Any) -> str:
    return (example.text_pair if span.in_text_pair else example.text)[span.start : span.end]


def test_wic_marks_the_word_in_both_sentences(tmp_path: Path) -> None:
    example = one(tmp_path, "WiC", WIC)
    assert [_span_text(example, span) for span in example.spans] == ["places", "place"]
    assert [span.in_text_pair for span in example.spans] == [False, True]


@pytest.mark.parametrize(
    ("text", "mention", "index", "start"),
    [
        ("Mark told Pete lies. He slept.", "He", 4, 21),
        ("Then he said: (he slept) here", "he", 3, 15),  # behind a bracket
        ("Ann and he met her here", "her", 4, 15),  # not the beginning of "here"
        ("The cat saw it. It slept", "it.", 3, 12),  # a full stop that is not of the mention
        ("We saw the old man today", "The\nold man", 2, 7),  # other case, a line break
        ("When theyscold him he cries", "they", 1, 5),  # the published text lacks a space
        ("One , two , three it left", "it", 4, 18),  # an index that is one off
    ],
)
def test_wsc_finds_a_mention_where_the_published_indices_point(
    tmp_path: Path, text: str, mention: str, index: int, start: int
) -> None:
    target = {"span1_index": 0, "span1_text": text.split()[0], "span2_index": index, "span2_text": mention}
    example = one(tmp_path, "WSC", {**WSC, "text": text, "target": target})
    assert example.spans[1].start == start
    assert _span_text(example, example.spans[1]).lower().split() == mention.rstrip(".").lower().split()


@pytest.mark.parametrize("task", TASKS)
def test_a_test_file_has_no_labels(tmp_path: Path, task: str) -> None:
    record = copy.deepcopy(RECORDS[task])
    record.pop("label", None)
    if task == "MultiRC":
        for question in record["passage"]["questions"]:
            for answer in question["answers"]:
                del answer["label"]
    if task == "ReCoRD":
        del record["qas"][0]["answers"]
    for example in read(f"superglue:{task}", json_lines(tmp_path / "test.jsonl", record)):
        told = {TextExample: "label", MultipleChoiceExample: "label", QAExample: "answerable"}[type(example)]
        assert getattr(example, told) is None


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("BoolQ", {"label": "yes"}, "label 'yes' is not one of false, true"),
    ("BoolQ", {"label": [1]}, r"label \[1\] is not one of false, true"),
    ("RTE", {"label": "neutral"}, "label 'neutral' is not one of"),
    ("RTE", {"premise": None}, "field 'premise' is not a string"),
    ("COPA", {"label": 2}, "label 2 is neither 0 nor 1"),
    ("COPA", {"question": "why"}, "neither cause nor effect"),
    ("MultiRC", {"passage": {"text": "t", "questions": ["x"]}}, "'questions' is not a list of objects"),
    ("ReCoRD", {"passage": {"text": "Bo", "entities": [{"start": 0, "end": 2}]}}, "entity 0–3 is not inside its text"),
    ("ReCoRD", {"qas": [{"query": "no gap", "idx": 0}]}, "the query has no @placeholder"),
    ("WiC", {"end2": 99}, "span of 'place' 8–99 is not inside its text: the text has 14 characters"),
    ("WiC", {"end1": 10}, "span of 'place' 10–10 is not inside its text: it is empty"),
    ("WiC", {"start1": "0"}, "field 'start1' is '0', not an integer"),
    ("WSC", {"text": "Mark told Pete"}, "'He' is not at word 7"),
]


@pytest.mark.parametrize(("task", "change", "complaint"), BAD)
def test_a_bad_record_is_named_and_can_be_skipped(
    tmp_path: Path, task: str, change: dict[str, Any], complaint: str
) -> None:
    path = json_lines(tmp_path / "train.jsonl", RECORDS[task], {**RECORDS[task], **change})
    said = refused(f"{path}:2", complaint, f"superglue:{task}", path)
    assert read(f"superglue:{task}", path, skip_bad=True).skipped == [said]


def test_a_passage_with_a_bad_answer_is_skipped_whole(tmp_path: Path) -> None:
    broken = copy.deepcopy(MULTIRC)
    broken["passage"]["questions"][1]["answers"][0]["label"] = 7  # type: ignore[index]
    examples = read("superglue:MultiRC", json_lines(tmp_path / "a.jsonl", broken, {**MULTIRC, "idx": 6}), skip_bad=True)
    assert {example.group for example in examples} == {"6:8", "6:9"}
