"""Records with too many or too few fields, numbers with commas, and other tables that could be misread."""

from __future__ import annotations

from pathlib import Path

import pytest
from task_files import refused, written

from qkv.data.formats import iter_examples_with_rows, read
from qkv.data.formats.io import ErrorPolicy


def test_fields_that_nobody_asked_for_may_be_missing_or_empty(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tsv", "text\tlabel\tnote\na\tx\tn\nb\ty\nc\tz\tn\t\t \n")
    examples = read("tsv", path)
    assert [(one.text, one.label) for one in examples] == [("a", "x"), ("b", "y"), ("c", "z")]
    assert examples.notes == [
        f"{path}: 1 row has more fields than the header (the first: line 4); the surplus is ignored",
        f"{path}: 1 row has fewer fields than the header (the first: line 3); no column in use is missing",
    ]


def test_a_field_of_a_column_in_use_must_be_there(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tsv", "text\tlabel\tnote\na\n")
    refused(f"{path}:2", "1 field where the table has 3 columns; 'label' is missing", "tsv", path)
    assert read("tsv", path, label=None)[0].text == "a"


def test_a_comma_in_a_text_that_is_not_quoted_is_never_cut_off(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "text,label\nGood, really good,5\n")
    refused(f"{path}:2", "3 fields where the table has 2 columns; put a text with ',' in quotation marks", "csv", path)
    refused(f"{path}:2", "3 fields", "csv", path, label=None)


def test_surplus_fields_are_fine_if_they_are_empty(tmp_path: Path) -> None:
    assert read("csv", written(tmp_path / "a.csv", "text,label\na,x,,\n"))[0].label == "x"


def test_a_text_that_a_comma_has_cut_is_an_error_even_if_others_are_quoted(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", 'text,label\n"a, b",0\ncut, text, 1\nc,1\n')
    refused(f"{path}:3", "3 fields where the table has 2 columns; put a text with ',' in quotation marks", "csv", path)
    examples = read("csv", path, skip_bad=True)
    assert [example.label for example in examples] == ["0", "1"]
    assert len(examples.skipped) == 1


def test_columns_without_a_name_are_those_that_half_of_the_rows_fill(tmp_path: Path) -> None:
    wide = written(tmp_path / "wide.tsv", "text\tlabel\na\tx\tn\nb\ty\tn\nc\tz\n")
    assert [example.label for example in read("tsv", wide)] == ["x", "y", "z"]
    odd = written(tmp_path / "odd.tsv", "text\tlabel\na\tx\nb\ty\ncut\ttext\t1\n")
    refused(f"{odd}:4", "3 fields where the table has 2 columns; remove a tab inside a text", "tsv", odd)
    cut = written(tmp_path / "cut.tsv", wide.read_text() + "cut\ttext\t1\tn\n")
    refused(f"{cut}:5", "4 fields where the table has 2 columns", "tsv", cut)


def test_a_second_column_of_a_name_that_is_not_in_use_replaces_nothing(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "text,label,n,n\na,x,1,2\n")
    _, row = next(iter_examples_with_rows("csv", path, ErrorPolicy()))
    assert row == {"text": "a", "label": "x", "n": "1", "n.4": "2"}
    refused(f"{path}:1", "2 columns have the name 'n'", "csv", path, id="n")


def test_a_decimal_comma_is_a_number_only_if_the_table_is_said_to_have_them(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "text;label\na;3,5\nb;1.234,5\n")
    refused(f"{path}:2", "is '3,5', not a number; set the option decimal_comma: true", "csv", path, regression=True)
    assert [one.label for one in read("csv", path, regression=True, decimal_comma=True)] == [3.5, 1234.5]


@pytest.mark.parametrize("value", ["1_000", "nan", "inf", "0x10", "1 000"])
def test_what_only_looks_like_a_number_is_refused(tmp_path: Path, value: str) -> None:
    path = written(tmp_path / "a.csv", f"text,label\na,{value}\n")
    refused(f"{path}:2", "not a number", "csv", path, regression=True)


def test_a_first_row_that_is_data_is_said_to_be_no_header(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "I liked it very much,5\nme too,4\n")
    refused(f"{path}:1", "if the file has no header, set header: false", "csv", path)


def test_an_option_of_delimited_text_is_not_ignored_for_other_files(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"text": "a", "label": "x"}\n')
    refused(str(path), "the option delimiter does not apply; leave it out", "jsonl", path, delimiter=";")
    refused(str(path), "the option header does not apply", "jsonl", path, header=False)
    refused(
        str(tmp_path / "a.parquet"),
        "the option encoding does not apply",
        "parquet",
        tmp_path / "a.parquet",
        encoding="utf-8",
    )


def test_quoted_fields_of_a_tsv_file_are_noted(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tsv", 'text\tlabel\n"he said ""no"""\tx\n')
    examples = read("tsv", path)
    assert examples[0].text == '"he said ""no"""'
    assert examples.notes[0].startswith(f"{path}: quotation marks are kept as they are; if they enclose fields")
    assert read("csv", path, delimiter="tab")[0].text == 'he said "no"'
