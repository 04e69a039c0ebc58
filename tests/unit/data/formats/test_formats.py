"""The one way in: names of formats, of columns, of parts, and what is said when one is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from task_files import refused, written

from qkv.data.formats import FORMATS, read, reader_options
from qkv.errors import InputError


def test_every_task_of_glue_and_superglue_is_there() -> None:
    glue = "CoLA SST-2 MRPC STS-B QQP MNLI MNLI-m MNLI-mm QNLI RTE WNLI AX"
    superglue = "BoolQ CB COPA MultiRC ReCoRD RTE WiC WSC AX-b AX-g"
    assert {f"glue:{name}" for name in glue.split()} | {f"superglue:{name}" for name in superglue.split()} <= set(
        FORMATS
    )


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_says_what_it_is_in_a_line(name: str) -> None:
    assert FORMATS[name].description
    assert len(f"{name} {FORMATS[name].description}") < 100


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_refuses_a_file_that_is_not_there(tmp_path: Path, name: str) -> None:
    options = {"targets": str(tmp_path / "no.csv")} if name == "aligned" else {}
    refused(f"{tmp_path / 'no.csv'}", "no such file", name, tmp_path / "no.csv", **options)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_refuses_an_empty_file(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "a.jsonl", "")
    options = {"targets": str(path)} if name == "aligned" else {}
    refused(str(path), "empty, no", name, path, **options)


@pytest.mark.parametrize(
    ("format", "nearest"),
    [("glue:MNIL", "glue:mnli"), ("superglue:copas", "superglue:copa"), ("conlu", "conllu"), ("squad2", "squad")],
)
def test_an_unknown_format_gets_the_nearest(format: str, nearest: str) -> None:
    with pytest.raises(InputError, match=f"data format '{format}' is unknown; did you mean '{nearest}'"):
        read(format, "x")


def test_capitals_do_not_matter_in_the_name_of_a_format(tmp_path: Path) -> None:
    path = written(tmp_path / "train.tsv", "sentence\tlabel\na gem\t1\n")
    assert read("glue:sst-2", path) == read("GLUE:SST-2", path) == read("glue:SST-2", tmp_path)


def test_an_unknown_column_gets_the_nearest_or_is_told_that_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="format 'csv' has no column or option 'labels'; did you mean 'label'"):
        read("csv", tmp_path, columns={"labels": "x"})
    with pytest.raises(InputError, match="'glue:RTE' has no column or option 'task'; its columns are fixed"):
        read("glue:RTE", tmp_path, task="CoLA")
    with pytest.raises(InputError, match="'aligned' needs 'targets'"):
        read("aligned", tmp_path)


def test_the_settings_of_a_format_are_what_its_reader_takes() -> None:
    assert reader_options("csv") == ["text", "label", "text_pair", "id", "group", "header", "regression", "label_separator"]
    assert reader_options("conllu") == ["tag"]
    assert reader_options("glue:RTE") == reader_options("clinc") == []


# Folders


def test_a_part_is_found_by_its_name_in_a_file_or_in_part_of_one(tmp_path: Path) -> None:
    for name in ("en_ewt-ud-train.conllu", "mine-dev.csv", "valid.tsv", "wnut17train.conll", "retrained.jsonl"):
        written(tmp_path / name, "")
    for format, part, name in (
        ("conllu", "train", "en_ewt-ud-train.conllu"),
        ("csv", "validation", "mine-dev.csv"),
        ("tsv", "dev", "valid.tsv"),
        ("conll", "train", "wnut17train.conll"),
    ):
        refused(str(tmp_path / name), "empty", format, tmp_path, split=part)
    refused(str(tmp_path), r"no train\*\.jsonl", "arc", tmp_path)


def test_several_files_for_a_part_are_listed(tmp_path: Path) -> None:
    for name in ("ARC-Easy-train.jsonl", "ARC-Challenge-train.jsonl"):
        written(tmp_path / name, "")
    refused(str(tmp_path), "several files .*: ARC-Challenge-train.jsonl, ARC-Easy-train.jsonl; name", "arc", tmp_path)


def test_a_file_called_exactly_after_its_part_comes_before_others(tmp_path: Path) -> None:
    written(tmp_path / "train.csv", "text,label\na,x\n")
    written(tmp_path / "train_full.csv", "")
    assert len(read("csv", tmp_path, split="train")) == 1
