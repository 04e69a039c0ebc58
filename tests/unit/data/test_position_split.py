"""One file can be split by position: the first part trains, the last parts are held out."""

from __future__ import annotations

from pathlib import Path

import pytest

from qkv.data.corpora.corpus import Document
from qkv.data.corpora.position_split import split_documents
from qkv.data.examples import QAExample, TextExample
from qkv.data.labels import describe_labels
from qkv.data.splitting import split_by_position
from qkv.recipe.schema import PairData, TaskData
from qkv.train.workloads.pair_data import read_datasets
from qkv.train.workloads.task_data import read_splits, with_detected_options


def texts(*names: str) -> list[Document]:
    return [Document(name, f"a:{number}") for number, name in enumerate(names, 1)]


def test_the_first_examples_train_and_the_last_are_held_out_valid_before_test() -> None:
    examples = [TextExample(str(number), "a") for number in range(10)]
    splits = split_by_position(examples, {"test": 0.1, "valid": 0.2})
    assert [[example.text for example in splits[name]] for name in ("train", "valid", "test")] == [
        [*"0123456"],
        [*"78"],
        [*"9"],
    ]


def test_a_task_and_pairs_are_split_by_position_in_the_order_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text;label\n" + "".join(f"t{n};x\n" for n in range(10)))
    data = TaskData(format="csv", train=str(tmp_path / "a.csv"), hold_out={"valid": 0.3}, split_by="position")
    splits = read_splits(data, ("train", "valid"))
    assert [example.text for example in splits["valid"]] == ["t7", "t8", "t9"]
    assert with_detected_options(data, splits.values()).delimiter == ";"
    pair_data = PairData(
        format="parallel",
        train=str(tmp_path / "a.csv"),
        columns={"source": "text", "target": "label"},
        hold_out={"valid": 0.1, "test": 0.2},
        split_by="position",
    )
    pairs = read_datasets(pair_data, ("train", "valid", "test"))
    assert [[pair.source for pair in sets[""]] for sets in pairs.values()] == [
        [f"t{n}" for n in range(7)],
        ["t7"],
        ["t8", "t9"],
    ]


def test_a_split_by_position_has_no_folds() -> None:
    with pytest.raises(ValueError, match="split_by: position goes with hold_out only"):
        TaskData(format="csv", train="a.csv", fold=[1, 5], split_by="position")


def test_the_end_of_one_document_can_be_held_out() -> None:
    document = texts("one two\nthree four\nfive six\nseven")
    assert [one.text for one in split_documents(document, 0.3, held_out=False)] == ["one two\nthree four\n"]
    assert [one.text for one in split_documents(document, 0.3, held_out=True)] == ["five six\nseven"]
    words = texts("one two three four")
    assert [one.text for one in split_documents(words, 0.5, held_out=True)] == ["three four"]


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.9])
def test_a_split_by_position_loses_and_repeats_no_text(fraction: float) -> None:
    documents = texts(*(f"document {n}\nwith {n * 7} lines" for n in range(20)))
    first = [one.text for one in split_documents(documents, fraction, held_out=False)]
    last = [one.text for one in split_documents(documents, fraction, held_out=True)]
    assert "".join([*first, *last]).replace("\n", "") == "".join(one.text for one in documents).replace("\n", "")


def test_the_labels_of_examples_are_counted_in_one_line() -> None:
    labels = ["a", "b", "a", ("a", "c")]
    assert describe_labels([TextExample("t", "x", label=label) for label in labels]) == "3 labels: a 3, b 1, c 1"
    numbers = [TextExample("t", "x", label=number) for number in (1.0, 2.0, 4.5)]
    assert describe_labels(numbers) == "labels: numbers from 1 to 4.5, 2.5 on average"
    many = [TextExample("t", "x", label=f"l{n:02}") for n in range(20)]
    assert describe_labels(many).endswith("l11 1 and 8 more, the rarest 1")
    questions = [QAExample("1", "q", "c", (), "x", answerable) for answerable in (True, True, False)]
    assert describe_labels(questions) == "2 labels: answerable 2, unanswerable 1"
    assert describe_labels([TextExample("t", "x")]) is None
