"""Delimiters and encodings are detected and noted, or obeyed; a wrong guess is unlikely."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from task_files import refused, written

from qkv.data.formats import read
from qkv.data.formats.dialect import RememberedDelimiter
from qkv.errors import InputError

GERMAN = [("Schön, wirklich; großartig", "gut"), ("Öde und überflüssig", "schlecht")]


def a_table(delimiter: str) -> str:
    rows = [("text", "label"), *GERMAN]
    return "".join(
        delimiter.join(f'"{field}"' if delimiter in field else field for field in row) + "\n" for row in rows
    )


def pairs_of(path: Path, **options: object) -> list[tuple[str, object]]:
    return [(example.text, example.label) for example in read("csv", path, **options)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1252", "latin-1", "utf-16", "utf-32"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_any_usual_delimiter_and_encoding_is_detected(tmp_path: Path, delimiter: str, encoding: str) -> None:
    path = written(tmp_path / "a.csv", a_table(delimiter).encode(encoding))
    assert pairs_of(path) == GERMAN


def test_what_was_detected_is_noted_in_one_line(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", a_table(";").encode("latin-1"))
    examples = read("csv", path)
    assert examples.notes == [f"{path}: encoding cp1252, delimiter ';' (detected)"]
    assert examples.detected == {str(path): {"encoding": "cp1252", "delimiter": ";"}}
    plain = read("csv", written(tmp_path / "b.csv", "text,label\na,x\n"))
    assert (plain.notes, plain.detected) == ([], {str(tmp_path / "b.csv"): {"delimiter": ","}})


def test_a_given_delimiter_and_encoding_are_obeyed_and_not_noted(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "text^label\nпривет^да\n".encode("cp1251"))
    examples = read("csv", path, delimiter="^", encoding="cp1251")
    assert [(one.text, one.label) for one in examples] == [("привет", "да")]
    assert (examples.notes, examples.detected) == ([], {})


def test_utf8_is_read_as_such_even_if_a_run_expects_another_encoding(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", a_table(","))
    examples = read("csv", path, encoding="cp1252")
    assert examples[0].text == GERMAN[0][0]
    assert examples.notes == [f"{path}: encoding utf-8 (detected)"]


@pytest.mark.parametrize(
    ("text", "encoding"),
    [("Привет как дела у вас", "cp1251"), ("今日はとても良い天気です", "shift_jis"), ("你好世界", "gb18030")],
)
def test_text_that_is_not_western_is_refused_instead_of_misread(tmp_path: Path, text: str, encoding: str) -> None:
    path = written(tmp_path / "a.csv", f"text,label\n{text},x\n".encode(encoding))
    refused(str(path), "neither UTF-8 nor Western European text; give its encoding", "csv", path)
    assert pairs_of(path, encoding=encoding, label=None) == [(text, None)]


def test_polish_in_its_own_encoding_is_refused_instead_of_misread(tmp_path: Path) -> None:
    words = "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw złoty"
    path = written(tmp_path / "a.csv", f"text,label\n{words},x\n".encode("cp1250"))
    refused(str(path), "give its encoding", "csv", path)


def test_single_bad_bytes_do_not_change_the_encoding_of_a_file(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "text,label\nÄÖÜ,x\n".encode() + b"b\xe9,x\n")
    refused(f"{path}:3", "byte 2 of the line, 0xE9, is not UTF-8", "csv", path)


def test_delimiters_inside_quoted_texts_do_not_count(tmp_path: Path) -> None:
    rows = "".join(f'"{number}; one; two; three",x\n' for number in range(20))
    assert len(read("csv", written(tmp_path / "a.csv", f"text,label\n{rows}"))) == 20
    unquoted = "".join(f"{number}; one; two; three,x\n" for number in range(20))
    assert read("csv", written(tmp_path / "b.csv", f"text,label\n{unquoted}"))[0].text == "0; one; two; three"


def test_a_table_without_a_header_has_the_delimiter_that_divides_all_records_alike(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "good, really;pos\nbad;neg\nfine, so, so;pos\n")
    assert [one.label for one in read("csv", path, header=False, text="1", label="2")] == ["pos", "neg", "pos"]


def test_a_quotation_mark_in_a_table_with_tabs_is_a_character_unless_all_are_quoted(tmp_path: Path) -> None:
    plain = written(tmp_path / "a.csv", 'text\tlabel\n"he said\tx\n5" pipe\ty\n')
    assert [one.text for one in read("csv", plain)] == ['"he said', '5" pipe']
    quoted = written(tmp_path / "b.csv", 'text\tlabel\n"he ""said"" it"\tx\n')
    assert read("csv", quoted)[0].text == 'he "said" it'


def test_conll_and_pairs_are_read_in_a_detected_encoding(tmp_path: Path) -> None:
    conll = written(tmp_path / "a.conll", "Müller B-PER\nläuft O\n".encode("latin-1"))
    assert read("conll", conll)[0].words == ("Müller", "läuft")
    pairs = written(tmp_path / "a.tsv", "über\tover\n".encode("latin-1"))
    assert read("pairs:tsv", pairs)[0].source == "über"


def test_json_is_utf8_unless_an_encoding_is_given(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"text": "schön", "label": "x"}\n'.encode("latin-1"))
    refused(f"{path}:1", "0xF6, is not UTF-8", "jsonl", path)
    assert read("jsonl", path, encoding="latin-1")[0].text == "schön"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"delimiter": ";;"}, "delimiter ';;': is one character"),
        ({"delimiter": ""}, "is one character"),
        ({"encoding": "utf-9"}, "encoding 'utf-9': is unknown"),
        ({"encoding": "base64"}, "encoding 'base64': is unknown"),
    ],
)
def test_a_wrong_delimiter_or_encoding_is_one_line(tmp_path: Path, options: dict[str, str], complaint: str) -> None:
    path = written(tmp_path / "a.csv", "text,label\na,x\n")
    with pytest.raises(InputError, match=complaint):
        read("csv", path, **options)


def test_a_given_delimiter_that_the_file_lacks_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "text,label\na,x\n")
    refused(f"{path}:1", "no column 'text'; the file has ','; give --delimiter ','", "csv", path, delimiter=";")


@pytest.mark.parametrize(
    ("content", "options"),
    [("text;label\na, b;x\n", {}), ("a b;x\n", {"text": "1", "label": "2", "header": False})],
)
def test_the_delimiter_of_a_run_gives_way_to_one_that_yields_the_columns(
    tmp_path: Path, content: str, options: dict[str, Any]
) -> None:
    path = written(tmp_path / "a.csv", content)
    examples = read("csv", path, delimiter=RememberedDelimiter(","), **options)
    assert examples[0].label == "x"
    assert examples.notes == [f"{path}: delimiter ';' (detected)"]


def test_the_delimiter_of_a_run_is_used_where_it_yields_the_columns(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "text;label\na, b;x\n")
    examples = read("csv", path, delimiter=RememberedDelimiter(";"))
    assert (examples[0].text, examples.notes) == ("a, b", [])
    other = written(tmp_path / "b.csv", "txt;lab\na;x\n")
    refused(f"{other}:1", "the file has ';'; give --delimiter ';'", "csv", other, delimiter=RememberedDelimiter(","))
