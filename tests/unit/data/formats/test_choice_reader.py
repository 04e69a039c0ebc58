"""Multiple choice: SWAG, ARC and CommonsenseQA in every form that they go about in, and a person's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from task_files import json_lines, refused, written

from qkv.data.examples import MultipleChoiceExample
from qkv.data.formats import read

SWAG = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3"
SWAG_ROW = '0,anetv_1,10,He sits. He,He sits.,He,gold,"runs, fast.",eats.,sleeps.,leaves.'
OFFICIAL = {
    "id": "Mercury_1",
    "question": {"stem": "Why?", "choices": [{"text": "heat", "label": "1"}, {"text": "cold", "label": "2"}]},
    "answerKey": "2",
}
HUB = {
    "id": "Mercury_1",
    "question": "Why?",
    "choices": {"text": ["heat", "cold"], "label": ["A", "B"]},
    "answerKey": "B",
}
PLAIN = {"id": "Mercury_1", "question": "Why?", "choices": ["heat", "cold"], "answer": 1}


def test_swag_has_a_sentence_a_beginning_and_four_endings(tmp_path: Path) -> None:
    path = written(tmp_path / "train.csv", f"{SWAG},label\n{SWAG_ROW},2\n")
    endings = ("runs, fast.", "eats.", "sleeps.", "leaves.")
    assert read("swag", tmp_path, split="train") == [MultipleChoiceExample("He sits.", endings, 2, f"{path}:2", "He")]


def test_swags_test_file_has_no_labels(tmp_path: Path) -> None:
    written(tmp_path / "test.csv", f"{SWAG}\n{SWAG_ROW}\n")
    assert [one.label for one in read("swag", tmp_path, split="test")] == [None]


@pytest.mark.parametrize("record", [OFFICIAL, HUB, PLAIN])
@pytest.mark.parametrize("format", ["arc", "commonsense_qa"])
def test_the_three_forms_of_an_exam_are_one_choice(tmp_path: Path, record: dict[str, Any], format: str) -> None:
    path = json_lines(tmp_path / "a.jsonl", record)
    assert read(format, path) == [MultipleChoiceExample("Why?", ("heat", "cold"), 1, f"{path}:1", id="Mercury_1")]


@pytest.mark.parametrize("record", [OFFICIAL, HUB, PLAIN])
def test_an_exam_without_its_key_has_no_right_option(tmp_path: Path, record: dict[str, Any]) -> None:
    kept = {name: value for name, value in record.items() if name not in ("answerKey", "answer")}
    assert read("arc", json_lines(tmp_path / "a.jsonl", kept))[0].label is None


def test_a_persons_own_table_names_its_columns(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.csv", "q,a,b,c,right\nWhy?,x,y,z,2\n")
    columns = {"context": "q", "choices": "a,b,c", "answer": "right"}
    assert read("choices", path, columns=columns) == [MultipleChoiceExample("Why?", ("x", "y", "z"), 2, f"{path}:2")]
    path = json_lines(tmp_path / "mine.jsonl", PLAIN)
    assert read("choices", path)[0].label == 1


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({**OFFICIAL, "answerKey": "C"}, "answerKey 'C' is not one of the labels 1, 2"),
        ({**HUB, "choices": {"text": ["heat"], "label": ["A", "B"]}}, "1 choices have 2 labels"),
        ({**PLAIN, "answer": 2}, "the answer is 2, but the choices are 0 to 1"),
        ({**PLAIN, "answer": "9" * 5000}, "not an integer"),
        ({**PLAIN, "answer": True}, "field 'answer' is True, not an integer"),
        ({**PLAIN, "choices": ["heat", 3]}, r"field 'choices\[1\]' is not a string"),
        ({**PLAIN, "choices": "heat"}, "field 'choices' is not a list of strings"),
        ({"question": "Why?"}, "no field 'choices'"),
    ],
)
def test_a_bad_question_is_named_and_can_be_skipped(tmp_path: Path, record: dict[str, Any], complaint: str) -> None:
    path = json_lines(tmp_path / "a.jsonl", PLAIN, record)
    said = refused(f"{path}:2", complaint, "arc", path)
    assert read("arc", path, skip_bad=True).skipped == [said]


def test_a_label_that_is_no_ending_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "train.csv", f"{SWAG},label\n{SWAG_ROW},4\n{SWAG_ROW},x\n")
    refused(f"{path}:2", "the answer is 4, but the choices are 0 to 3", "swag", path)
