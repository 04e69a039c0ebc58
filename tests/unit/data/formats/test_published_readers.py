"""CLINC150, GoEmotions, Restaurant8k and Banking77 as they were published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from task_files import refused, tabs, written

from qkv.data.examples import TextExample
from qkv.data.formats import get_format, read

CLINC = {"oos_val": [["a show", "oos"]], "val": [["hi", "greeting"]], "train": [["hello", "greeting"], ["pay", "bill"]]}
CLINC |= {"oos_train": [["x", "oos"]]}


def test_clinc_has_all_parts_in_one_file(tmp_path: Path) -> None:
    path = written(tmp_path / "data_full.json", json.dumps(CLINC, indent=4))
    assert read("clinc", tmp_path) == [
        TextExample("hello", f"{path}: train 1", label="greeting"),
        TextExample("pay", f"{path}: train 2", label="bill"),
    ]
    assert [one.location for one in read("clinc", path, split="dev")] == [f"{path}: val 1"]
    assert [one.label for one in read("clinc", tmp_path, split="train+oos_train")] == ["greeting", "bill", "oos"]
    refused(str(path), "no split 'oos_test'; did you mean", "clinc", path, split="oos_test")
    assert not get_format("clinc").splits_in_folders(tmp_path)


def test_a_bad_record_of_clinc_is_named_by_its_number(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", json.dumps({"train": [["a", "x"], ["b"], ["", "x"], [3, "x"]]}))
    refused(f"{path}: train 2", "not a text and its intent", "clinc", path)
    assert len(read("clinc", path, skip_bad=True).skipped) == 3


def test_goemotions_gets_the_names_of_its_labels_beside_it(tmp_path: Path) -> None:
    path = written(tmp_path / "train.tsv", tabs('"Great" food|0,2|eebbqej', "meh|1|ed00q6i"))
    assert [one.label for one in read("goemotions", path)] == [("0", "2"), ("1",)]
    written(tmp_path / "labels.txt", "joy\nneutral\nlove\n")
    first, second = read("goemotions", tmp_path, split="train")
    assert first == TextExample('"Great" food', f"{path}:1", label=("joy", "love"), id="eebbqej")
    assert second.label == ("neutral",)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("b|3|id", "label '3' is not a number from 0 to 1"),
        ("b|x|id", "label 'x' is not a number"),
        (f"b|{'9' * 5000}|id", "is not a number from 0 to 1"),
        ("b|1", "2 fields where the table has 3"),
        ("b||id", "the column '2' is empty"),
    ],
)
def test_a_bad_line_of_goemotions_is_named(tmp_path: Path, row: str, complaint: str) -> None:
    written(tmp_path / "labels.txt", "joy\nlove\n")
    path = written(tmp_path / "train.tsv", tabs("a|0|id", row))
    said = refused(f"{path}:2", complaint, "goemotions", path)
    assert read("goemotions", path, skip_bad=True).skipped == [said]


def turn(text: str, *slots: tuple[str, dict[str, int]], **more: Any) -> dict[str, Any]:
    return {"userInput": {"text": text}, "labels": [{"slot": name, "valueSpan": span} for name, span in slots], **more}


def test_restaurant8k_has_spans_of_slots(tmp_path: Path) -> None:
    people, date = ("people", {"endIndex": 1}), ("date", {"startIndex": 5, "endIndex": 10})  # they leave a zero out
    records = [turn("5 on Friday", people, date, context={"requestedSlots": ["people"]}), {"userInput": {"text": "hi"}}]
    path = written(tmp_path / "train_0.json", json.dumps(records, indent=4))
    first, second = read("restaurant8k", tmp_path, split="train")
    spans = [(span.name, first.text[span.start : span.end]) for span in first.spans]
    assert spans == [("people", "5"), ("date", "Frida")]
    assert (first.text_pair, first.label, first.location) == ("people", ("date", "people"), f"{path}: record 1")
    assert second == TextExample("hi", f"{path}: record 2", label=())


def test_a_slot_outside_its_text_is_named_and_can_be_skipped(tmp_path: Path) -> None:
    records = [turn("5 of us", ("people", {"endIndex": 8})), turn("5 of us", ("people", {"endIndex": 7}))]
    path = written(tmp_path / "a.json", json.dumps(records))
    said = refused(
        f"{path}: record 1",
        "span of 'people' 0–8 is not inside its text: the text has 7 characters",
        "restaurant8k",
        path,
    )
    examples = read("restaurant8k", path, skip_bad=True)
    assert (len(examples), examples.skipped) == (1, [said])


def test_banking77_is_a_table_with_line_breaks_in_it(tmp_path: Path) -> None:
    path = written(tmp_path / "train.csv", 'text,category\r\n"Where\r\nis it?",card_arrival\r\n')
    assert read("banking77", tmp_path, split="train") == [
        TextExample("Where\nis it?", f"{path}:2", label="card_arrival")
    ]
