"""A person's own table: every form, every packing, every bad record named by file and line."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from task_files import json_lines, refused, written

from qkv.data.examples import TextExample
from qkv.data.formats import read, table
from qkv.data.formats.io import ErrorPolicy, csv_records
from qkv.errors import InputError

REVIEWS = {"text": "review", "label": "stars"}


def test_a_csv_file_is_read_by_the_names_of_its_columns(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.csv", 'stars,review\n5,"Good, ""really"" good"\n1,bad\n')
    assert table.read(path, text="review", label="stars") == [
        TextExample('Good, "really" good', f"{path}:2", label="5"),
        TextExample("bad", f"{path}:3", label="1"),
    ]


def test_a_record_of_many_lines_has_the_number_of_its_first(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.csv", 'text,label\r\n"one\r\ntwo\r\n\r\nfour",a\r\n\r\nlast,b\r\n')
    examples = table.read(path)
    assert [(one.text, one.location) for one in examples] == [("one\ntwo\n\nfour", f"{path}:2"), ("last", f"{path}:7")]


@given(st.lists(st.tuples(st.text(min_size=1), st.text(min_size=1)), min_size=1))
def test_every_record_that_csv_can_write_comes_back(tmp_path_factory: Any, records: list[tuple[str, str]]) -> None:
    records = [tuple(re.sub("[\r\0]", "·", field) for field in record) for record in records]
    quoted = [",".join('"' + field.replace('"', '""') + '"' for field in record) for record in records]
    content = "\n".join(quoted).encode("utf-8", "replace")  # lone surrogates are no text
    path = written(tmp_path_factory.mktemp("csv") / "a.csv", content)
    expected = [[field.encode("utf-8", "replace").decode() for field in record] for record in records]
    assert [record for _, record in csv_records(path, ErrorPolicy())] == expected


def test_a_field_longer_than_the_librarys_own_limit_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "long.csv", f"text,label\n{'x' * 200_000},a\n")
    assert len(table.read(path)[0].text) == 200_000


def test_tsv_takes_a_quotation_mark_for_a_character(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.tsv", 'text\tother\tlabel\n"Quoted\tx\ta\n5" pipe\t\tb\n')
    assert [one.text for one in table.read(path)] == ['"Quoted', '5" pipe']


def test_json_lines_give_labels_the_names_that_a_csv_file_would(tmp_path: Path) -> None:
    labels = ["a", 3, True, 2.5]
    path = json_lines(tmp_path / "mine.jsonl", *({"text": "t", "label": label} for label in labels))
    assert [one.label for one in table.read(path)] == ["a", "3", "true", "2.5"]


def test_a_json_list_is_read_by_record(tmp_path: Path) -> None:
    path = written(
        tmp_path / "mine.json", json.dumps([{"text": "a", "label": "x"}, {"text": "b", "label": "y"}], indent=1)
    )
    assert table.read(path)[1] == TextExample("b", f"{path}: record 2", label="y")
    lines = json_lines(tmp_path / "lines.json", {"text": "a", "label": "x"})
    assert table.read(lines) == [TextExample("a", f"{lines}:1", label="x")]


def test_a_list_or_a_separator_makes_several_labels(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl", {"text": "t", "label": ["x", "y"]}, {"text": "t", "label": []})
    assert [one.label for one in table.read(path)] == [("x", "y"), ()]
    path = written(tmp_path / "a.csv", "text,label\nt,x; y\nt,\n")
    assert [one.label for one in table.read(path, label_separator=";")] == [("x", "y"), ()]


def test_a_number_is_a_label_to_be_regressed(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "text,label\nt,2.50\nt,nan\n")
    said = refused(f"{path}:3", "'nan', not a number", "csv", path, regression=True)
    assert read("csv", path, regression=True, skip_bad=True)[0].label == 2.5
    assert read("csv", path, regression=True, skip_bad=True).skipped == [said]


def test_without_a_header_columns_are_called_by_their_numbers(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tsv", "good\t1\nbad\t0\n")
    examples = read("tsv", path, columns={"text": "1", "label": "2"}, header=False)
    assert [(one.text, one.label, one.location) for one in examples] == [
        ("good", "1", f"{path}:1"),
        ("bad", "0", f"{path}:2"),
    ]


def test_pairs_ids_and_unlabelled_files_are_read(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "n,one,two\n7,a,b\n")
    columns = {"text": "one", "text_pair": "two", "label": None, "id": "n"}
    assert read("table", path, columns=columns) == [TextExample("a", f"{path}:2", "b", None, id="7")]


def test_an_id_that_a_json_record_lacks_is_missed(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl", {"text": "a", "label": "x", "n": 1}, {"text": "a", "label": "x"})
    refused(f"{path}:2", "no field 'n'", "jsonl", path, columns={"id": "n"})


@pytest.mark.parametrize("content", [b"\xef\xbb\xbftext,label\na\xc3\xa9,x\n", b"text,label\r\na\xc3\xa9,x\r\n"])
@pytest.mark.parametrize("kind", ["", ".gz", ".zst"])
def test_a_byte_order_mark_windows_ends_and_packing_change_nothing(tmp_path: Path, content: bytes, kind: str) -> None:
    pack = {"": lambda b: b, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[kind]
    path = written(tmp_path / f"a.csv{kind}", pack(content))
    assert table.read(path) == [TextExample("aé", f"{path}:2", label="x")]


# Refusing


@pytest.mark.parametrize(
    ("name", "content"), [("a.csv", "review,stars,date\nx,1,2\n"), ("a.tsv", "review\tstars\tdate\n")]
)
def test_a_column_that_is_not_there_names_those_that_are(tmp_path: Path, name: str, content: str) -> None:
    path = written(tmp_path / name, content)
    said = refused(f"{path}:1", "no column 'text'", "table", path, columns={"label": "stars"}, skip_bad=True)
    assert said.endswith("the columns are: review, stars, date (--text names the column)")


@pytest.mark.parametrize(("text", "column"), [("reviw", "review"), ("REVIEW", "review"), ("dates", "date")])
def test_a_mistyped_column_is_corrected_with_the_option_that_names_it(tmp_path: Path, text: str, column: str) -> None:
    path = written(tmp_path / "a.csv", "review,label,date\na,x,1\n")
    said = refused(f"{path}:1", "no column", "csv", path, text=text)
    assert said == f"{path}:1: no column '{text}'; did you mean '{column}'? (--text names the column)"


def test_a_note_says_which_file_of_a_folder_was_read(tmp_path: Path) -> None:
    written(tmp_path / "train.csv", "text,label\na,x\n")
    dev = written(tmp_path / "dev.csv", "text,label\nb,y\n")
    assert read("csv", tmp_path, split="dev").notes == [f"{tmp_path}: the file read is dev.csv"]
    assert read("csv", dev).notes == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("review;label\na;x\n", "the columns are: review, label"),
        ("review:label\na:x\n", "the columns are: review:label"),
        ("I liked it,5\nme too,4\n", "if the file has no header, set header: false"),
        ('{"text": "a", "label": "x"}\n', "no column 'text', but JSON; give the format jsonl"),
    ],
)
def test_a_header_that_is_one_column_is_said_to_be_written_otherwise(tmp_path: Path, content: str, said: str) -> None:
    path = written(tmp_path / "a.csv", content)
    assert said in refused(f"{path}:1", "no column 'text'", "csv", path)


def test_a_column_can_say_which_examples_belong_together(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "text,label,author\na,x,Ann\nb,y,Bob\n")
    assert [one.group for one in read("csv", path, columns={"group": "author"})] == ["Ann", "Bob"]


def test_a_json_field_that_is_not_there_is_a_bad_record(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl", {"text": "a", "label": "x"}, {"text": "b", "lable": "x"})
    said = refused(f"{path}:2", "no field 'label'; did you mean 'lable'", "jsonl", path)
    assert read("jsonl", path, skip_bad=True).skipped == [said]


BAD_ROWS = [
    ("text,label\na,x\nb\nc,y\n", 3, "1 field where the table has 2 columns"),
    ("text,label\na,x\nb,c,d\nc,y\n", 3, "3 fields where the table has 2 columns"),
    ("text,label\na,x\n,x\nc,y\n", 3, "the column 'text' is empty here"),
    ("text,label\na,x\nb,\nc,y\n", 3, "the label 'label' is empty"),
    ('text,label\na,x\n"b"b,x\nc,y\n', 3, "not CSV"),
    (b"text,label,\xc3\xa9\xc3\xa9\na,x,\nb\xe9t\xe9,x,\nc,y,\n", 3, "byte 2 of the line, 0xE9, is not UTF-8"),
    (b'text,label,\xc3\xa9\na,x,\n"b\nb\xe9",x,\nc,y,\n', 4, "byte 2 of the line, 0xE9, is not UTF-8"),
]


@pytest.mark.parametrize(("content", "line", "complaint"), BAD_ROWS)
def test_a_bad_record_is_named_and_can_be_skipped(
    tmp_path: Path, content: str | bytes, line: int, complaint: str
) -> None:
    path = written(tmp_path / "a.csv", content)
    said = refused(f"{path}:{line}", complaint, "csv", path)
    examples = read("csv", path, skip_bad=True)
    assert [(one.text, one.label) for one in examples] == [("a", "x"), ("c", "y")]
    assert examples.skipped == [said]


def test_a_quotation_mark_that_nobody_closes_is_named_where_it_opens(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", 'text,label\na,x\n"b,x\nc,y\n')
    refused(f"{path}:3", "not CSV .*it took all 2 lines to the end of the file.*quotation marks", "csv", path)


def test_a_record_that_breaks_in_its_middle_is_not_said_to_take_all_lines(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", 'text,label\n"a\nb"c,x\nd,y\n')
    assert "to the end" not in refused(f"{path}:2", "not CSV .*quotation marks", "csv", path)


def test_old_line_ends_are_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "text,label\ra,x\rb,y\r")
    refused(f"{path}:1", "carriage return alone", "csv", path)


def test_a_header_that_is_not_utf8_is_never_skipped(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", b"text,label,\xe9\na,x,\xc3\xa9\n")
    refused(f"{path}:1", "0xE9, is not UTF-8", "csv", path, skip_bad=True)


def test_two_columns_of_one_name_are_refused_if_one_is_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "text,label,text,other,other\na,x,b,c,d\n")
    refused(f"{path}:1", "2 columns have the name 'text'", "csv", path)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.json"])
def test_an_empty_file_is_refused(tmp_path: Path, name: str) -> None:
    refused(str(tmp_path / name), "empty, no examples", "table", written(tmp_path / name, ""))


def test_a_file_with_nothing_but_bad_records_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", "[]\nnull\n")
    refused(
        str(path),
        f"all 2 records are bad, the first: {path}:1: not a JSON object",
        "jsonl",
        path,
        skip_bad=True,
    )


def test_a_missing_or_broken_file_is_never_skipped(tmp_path: Path) -> None:
    refused(str(tmp_path / "no.csv"), "no such file", "csv", tmp_path / "no.csv", skip_bad=True)
    whole = gzip.compress(b"text,label\n" + b"".join(b"%d,x\n" % number for number in range(9999)))
    path = written(tmp_path / "a.csv.gz", whole[:-200])
    with pytest.raises(InputError, match=r"the \.gz file is broken or ends early here"):
        read("csv", path, skip_bad=True)


def test_a_name_that_does_not_tell_its_form_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.data", "text,label\na,x\n")
    refused(str(path), r"unknown suffix; rename it to one of \.csv", "table", path)
    assert len(read("csv", path)) == 1
