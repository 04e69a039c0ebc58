"""The one way in: names of formats, of columns, of parts, and what is said when one is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from task_files import refused, written

from qkv.data.examples import TextExample
from qkv.data.formats import FORMATS, pair_formats, read, reader_options, register_format
from qkv.data.formats.io import ErrorPolicy, read_lines
from qkv.data.pair import Pair
from qkv.errors import InputError


def test_every_task_of_glue_and_superglue_is_there() -> None:
    glue = "CoLA SST-2 MRPC STS-B QQP MNLI MNLI-m MNLI-mm QNLI RTE WNLI AX"
    superglue = "BoolQ CB COPA MultiRC ReCoRD RTE WiC WSC AX-b AX-g"
    assert {f"glue:{name}" for name in glue.split()} | {f"superglue:{name}" for name in superglue.split()} <= set(
        FORMATS.names()
    )


@pytest.mark.parametrize("name", FORMATS.names())
def test_every_format_says_what_it_is_in_a_line(name: str) -> None:
    assert FORMATS.get(name).description
    assert len(f"{name} {FORMATS.get(name).description}") < 100


@pytest.mark.parametrize("name", FORMATS.names())
def test_every_format_refuses_a_file_that_is_not_there(tmp_path: Path, name: str) -> None:
    options = {"targets": str(tmp_path / "no.csv")} if name == "aligned" else {}
    refused(f"{tmp_path / 'no.csv'}", "no such file", name, tmp_path / "no.csv", **options)


@pytest.mark.parametrize("name", FORMATS.names())
def test_every_format_refuses_an_empty_file(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "a.jsonl", "")
    options = {"targets": str(path)} if name == "aligned" else {}
    refused(str(path), "empty, no", name, path, **options)


@pytest.mark.parametrize(
    ("format", "nearest"),
    [("glue:MNIL", "glue:MNLI"), ("superglue:COPAS", "superglue:COPA"), ("conlu", "conllu"), ("squad2", "squad")],
)
def test_an_unknown_format_gets_the_nearest(format: str, nearest: str) -> None:
    with pytest.raises(InputError, match=f"there is no data format '{format}'; did you mean '{nearest}'"):
        read(format, "x")


def test_capitals_do_not_matter_in_the_name_of_a_format(tmp_path: Path) -> None:
    path = written(tmp_path / "train.tsv", "sentence\tlabel\na gem\t1\n")
    assert read("glue:sst-2", path) == read("GLUE:SST-2", path) == read("glue:SST-2", tmp_path)


def test_an_unknown_column_gets_the_nearest_or_is_told_that_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="format 'csv' has no column or option 'lable'; did you mean 'label'"):
        read("csv", tmp_path, columns={"lable": "x"})
    with pytest.raises(InputError, match="'glue:RTE' has no column or option 'task'; its columns are fixed"):
        read("glue:RTE", tmp_path, task="CoLA")
    with pytest.raises(InputError, match="'aligned' needs 'targets'"):
        read("aligned", tmp_path)


def test_the_settings_of_a_format_are_what_its_reader_takes() -> None:
    assert reader_options("csv") == [
        "text",
        "label",
        "text_pair",
        "id",
        "group",
        "labels",
        "header",
        "delimiter",
        "encoding",
        "regression",
        "decimal_comma",
        "label_separator",
    ]
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
    refused(str(tmp_path), "several files .*: ARC-Challenge-train.jsonl, ARC-Easy-train.jsonl; give", "arc", tmp_path)


def test_a_file_called_exactly_after_its_part_comes_before_others(tmp_path: Path) -> None:
    written(tmp_path / "train.csv", "text,label\na,x\n")
    written(tmp_path / "train_full.csv", "")
    assert len(read("csv", tmp_path, split="train")) == 1


# Formats of users


@pytest.fixture
def own_name() -> Iterator[str]:
    """A free name; what a test registers under it is forgotten afterwards."""
    yield "own_format"
    FORMATS._entries.pop("own_format", None)


def test_a_registered_reader_is_read_like_a_built_in_format(tmp_path: Path, own_name: str) -> None:
    @register_format(own_name, suffixes=(".own",))
    def read_own(path: Path, error_policy: ErrorPolicy, *, separator: str = "=") -> Iterator[TextExample]:
        """Lines of text, separator, label."""
        for location, line in read_lines(path, error_policy):
            with error_policy:
                text, _, label = line.partition(separator)
                yield TextExample(text, location, label=label)

    written(tmp_path / "dev.own", "good:1\n")
    [example] = read(own_name, tmp_path, split="dev", columns={"separator": ":"})
    assert (example.text, example.label) == ("good", "1")
    assert reader_options(own_name) == ["separator"]
    assert FORMATS.get(own_name).description == "Lines of text, separator, label."


def test_a_taken_name_of_a_format_is_refused() -> None:
    with pytest.raises(InputError, match="'csv' is already registered"):
        register_format("csv", lambda *_: iter(()))


def test_a_registered_format_of_pairs_is_one_of_the_pair_formats(own_name: str) -> None:
    assert {"aligned", "tsv", "jsonl", "cmudict", "parallel", "summaries", "scitldr"} == set(pair_formats())
    register_format(own_name, lambda *_: iter(()), example_type=Pair, description="own pairs")
    assert own_name in pair_formats()
