"""Rows that are no lines: Parquet, folders of `datasets`, data frames and other objects; one-hot columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from task_files import json_lines, refused, written

from qkv.data.examples import ImageExample, MultipleChoiceExample, QAExample, TaggedExample, TextExample
from qkv.data.formats import infer_format, iter_examples_with_rows, read
from qkv.data.formats.in_memory import is_row_data, read_rows
from qkv.data.formats.io import ErrorPolicy
from qkv.data.pair import Pair, SourceWithReferences
from qkv.errors import InputError
from qkv.tasks.base import get_task

ANSWERS = {"text": np.array(["Ada"]), "answer_start": np.array([0], dtype=np.int32)}
COLUMNS: dict[type, dict[str, list[Any]]] = {
    TextExample: {"text": ["a", "b"], "label": [1, 0]},
    TaggedExample: {"words": [["New", "York"], ["x"]], "tags": [["B-x", "I-x"], ["O"]]},
    QAExample: {"question": ["Who?", "Who?"], "context": ["Ada.", "Ada!"], "answers": [ANSWERS, ANSWERS]},
    MultipleChoiceExample: {"question": ["q", "r"], "choices": [["a", "b"], ["c", "d"]], "answer": [1, 0]},
    Pair: {"source": ["a", "b"], "target": ["c", "d"]},
    SourceWithReferences: {"document": ["a", "b"], "summary": ["c", "d"]},
}


class Feature:
    """A feature of `datasets`: class names, or a sequence of features."""

    def __init__(self, names: list[str] | None = None, feature: Any = None) -> None:
        self.names, self.feature = names, feature


class Dataset:
    """The methods of a Hugging Face dataset that are used."""

    def __init__(self, columns: dict[str, list[Any]], features: dict[str, Any]) -> None:
        self.columns, self.features, self.column_names = columns, features, list(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: values[index] for name, values in self.columns.items()}


def without_location(example: Any) -> str:
    return repr(example).replace(example.location, "")


@pytest.mark.parametrize("example_type", COLUMNS)
def test_every_kind_of_object_and_a_parquet_file_give_the_same_examples(tmp_path: Path, example_type: type) -> None:
    columns = COLUMNS[example_type]
    records = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    frame = pd.DataFrame(columns)
    frame.to_parquet(tmp_path / "a.parquet")
    objects = [columns, records, frame, pa.Table.from_pandas(frame), Dataset(columns, {})]
    expected = [without_location(example) for example in read_rows(objects[0], None, example_type)]
    assert len(expected) == 2
    for data in objects:
        assert is_row_data(data)
        assert [without_location(example) for example in read_rows(data, None, example_type)] == expected
    path = tmp_path / "a.parquet"
    from_file = read(infer_format(example_type, path), path)
    assert [without_location(example).replace("row ", "") for example in from_file] == expected
    assert from_file[1].location == f"{path}: row 2"


def test_paths_of_images_are_read_from_rows(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    [example] = read_rows({"file": [str(tmp_path / "a.png")], "label": ["x"]}, None, ImageExample)
    assert (example.image, example.label) == (tmp_path / "a.png", "x")


def test_class_labels_of_a_dataset_become_their_names() -> None:
    classes = Feature(["neg", "pos"])
    assert read_rows(Dataset({"text": ["a"], "label": [1]}, {"label": classes}))[0].label == "pos"
    tags = {"ner_tags": Feature(feature=Feature(["O", "B-x"]))}
    columns = {"words": "tokens", "tags": "ner_tags"}
    dataset = Dataset({"tokens": [["a", "b"]], "ner_tags": [[1, 0]]}, tags)
    assert read_rows(dataset, None, TaggedExample, columns)[0].tags == ("B-x", "O")


def saved(folder: Path, table: pa.Table) -> Path:
    """A dataset as `save_to_disk` writes it."""
    folder.mkdir(parents=True)
    with pa.OSFile(str(folder / "data-0.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    written(folder / "state.json", json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    return folder


def test_a_folder_of_save_to_disk_is_read_with_its_splits_and_class_names(tmp_path: Path) -> None:
    features = {"info": {"features": {"label": {"names": ["neg", "pos"], "_type": "ClassLabel"}}}}
    table = pa.table({"text": ["a"], "label": [1]}).replace_schema_metadata({"huggingface": json.dumps(features)})
    saved(tmp_path / "all" / "train", table)
    saved(tmp_path / "all" / "validation", table)
    written(tmp_path / "all" / "dataset_dict.json", '{"splits": ["train", "validation"]}')
    assert infer_format(TextExample, tmp_path / "all") == "parquet"
    assert read("parquet", tmp_path / "all", split="dev")[0].label == "pos"
    assert read("parquet", tmp_path / "all" / "train")[0].label == "pos"
    refused(
        str(tmp_path / "all"),
        "no split 'test'; the folder contains: train, validation",
        "parquet",
        tmp_path / "all",
        split="test",
    )


def test_a_damaged_parquet_file_is_one_line(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a" * 1000], "label": ["x"]}), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    for size in (0, 3, 4, 60, len(content) // 2, len(content) - 1):
        path = written(tmp_path / f"{size}.parquet", content[:size])
        refused(str(path), "empty, no examples" if size == 0 else "damaged Parquet", "parquet", path)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (3, "expected a data frame"),
        ("a.csv", "expected a data frame"),
        (pd.Series(["a"]), "expected a data frame"),
        ([1, 2], "expected a data frame"),
        ([], "empty, no examples"),
        ({"text": ["a"], "label": ["x", "y"]}, "different lengths"),
        ({"text": "a"}, "the column 'text' is not a list"),
        (pd.DataFrame({"review": ["a"]}), "DataFrame: no column 'text'; the columns are: review"),
        (pd.DataFrame([["a", "b"]], columns=["text", "text"]), "several columns have the name 'text'"),
        (pd.DataFrame({"text": ["a", None], "label": [1, 1]}), "DataFrame: row 2: the column 'text' is empty here"),
        ({"train": Dataset({"text": ["a"]}, {})}, "has the splits train; give one of them"),
    ],
)
def test_an_object_that_has_no_examples_is_one_line(data: Any, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        read_rows(data)


def test_each_example_comes_with_the_fields_of_its_record(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "id,text,date\n1,a,May\n2,,June\n3,c,July\n")
    policy = ErrorPolicy(skip=True)
    pairs = list(iter_examples_with_rows("csv", path, policy, columns={"label": None}))
    assert [(example.text, row) for example, row in pairs] == [
        ("a", {"id": "1", "text": "a", "date": "May"}),
        ("c", {"id": "3", "text": "c", "date": "July"}),
    ]
    path = json_lines(tmp_path / "a.jsonl", {"words": ["a"], "n": 1}, {"words": ["b"], "n": 2})
    rows = [row["n"] for _, row in iter_examples_with_rows("words", path, ErrorPolicy(), columns={"tags": None})]
    assert rows == [1, 2]
    path = written(tmp_path / "a.conll", "a O\n")
    assert [row for _, row in iter_examples_with_rows("conll", path, ErrorPolicy())] == [{}]


# One-hot columns


def test_one_hot_columns_are_labels_of_a_text(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "text,toxic,insult\na,1,1\nb,0,0\nc,0,1\n")
    for labels in (["toxic", "insult"], "toxic, insult"):
        assert [one.label for one in read("csv", path, labels=labels)] == [("toxic", "insult"), (), ("insult",)]
    assert [one.label for one in read("csv", path, labels=["toxic"], label=None)] == [None] * 3


def test_one_hot_columns_of_which_one_is_set_are_classes(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "text,pos,neg\na,1,0\nb,0,1\nc,1,1\n")
    task, examples = get_task("text_classification"), read("csv", path, labels=["pos", "neg"])
    assert task.labels(examples[:2]) == ("neg", "pos")
    with pytest.raises(InputError, match=r"a\.csv:4: the label .* is not a single class"):
        task.labels(examples)


def test_a_one_hot_field_that_is_neither_0_nor_1_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "text,pos,neg\na,1,2\n")
    refused(f"{path}:2", "the label column 'neg' is '2', neither 0 nor 1", "csv", path, labels="pos,neg")
    refused(f"{path}:1", "no column 'neutral'", "csv", path, labels="pos,neutral")
