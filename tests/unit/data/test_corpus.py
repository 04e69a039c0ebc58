"""Corpora: every kind of file gives its documents, and every bad line is named by file and number."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.data.corpora.corpus import Corpus, Document
from qkv.errors import InputError


def written(folder: Path, content: str | bytes, name: str = "text.txt") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts(*paths: Path | str, **how: str) -> list[str]:
    return [document.text for document in Corpus(paths, **how)]


def complaint(*paths: Path | str, **how: str) -> str:
    with pytest.raises(InputError) as raised:
        list(Corpus(paths, **how))
    assert "\n" not in str(raised.value)
    return str(raised.value)


# Plain text


def test_lines_are_documents_and_blank_ones_are_none(tmp_path: Path) -> None:
    path = written(tmp_path, "one\n\n  \n two, \xe9\u2028t\xe9\r\nthree")
    found = list(Corpus([path], format="line_per_document"))
    assert [(d.text, d.location) for d in found] == [
        ("one", f"{path}:1"),
        (" two, \xe9\u2028t\xe9", f"{path}:4"),
        ("three", f"{path}:5"),
    ]


def test_blank_lines_stand_between_documents_whose_lines_are_sentences(tmp_path: Path) -> None:
    path = written(tmp_path, "\n\nFirst. Still first\nsecond\n \n\r\nnext\n\n")
    found = list(Corpus([path], format="blank_line_separated"))
    assert [(d.sentences, d.location) for d in found] == [
        (["First. Still first", "\nsecond"], f"{path}:3"),
        (["next"], f"{path}:7"),
    ]


def test_a_whole_file_may_be_a_document_with_lines_that_end_anywhere(tmp_path: Path) -> None:
    path = written(tmp_path, "Call me\r\nIshmael. Some years\nago\n\nLoomings")
    (found,) = Corpus([path], format="file_per_document")
    assert found.sentences == ["Call me\nIshmael.", " Some years\nago", "\n\nLoomings"]
    assert found.location == f"{path}:1"


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert texts(written(tmp_path, b"\xef\xbb\xbfone\n\xef\xbb\xbftwo"), format="line_per_document") == [
        "one",
        "\ufefftwo",
    ]


def test_plain_text_has_to_be_told_where_a_document_ends(tmp_path: Path) -> None:
    assert "line_per_document, blank_line_separated" in complaint(written(tmp_path, "one"))
    assert "line_per_document, blank_line_separated" in complaint(written(tmp_path, b"", "a.txt.gz"))
    written(tmp_path, "one", "in/a.txt")
    assert "line_per_document, blank_line_separated" in complaint(tmp_path / "in")


def test_what_is_not_utf8_is_named_by_line_and_byte(tmp_path: Path) -> None:
    path = written(tmp_path, b"one\ntw\xff\n")
    assert complaint(path, format="line_per_document").startswith(f"{path}:2: byte 3 of the line, 0xFF, is not UTF-8")


# Packed


def test_gzip_is_read(tmp_path: Path) -> None:
    assert texts(written(tmp_path, gzip.compress(b"one\ntwo"), "a.txt.gz"), format="line_per_document") == [
        "one",
        "two",
    ]


@pytest.mark.parametrize("keep", [3, -9, 900])
def test_half_a_gzip_file_is_named_by_line(tmp_path: Path, keep: int) -> None:
    lines = "".join(f"line {number * 7919 % 1000}\n" for number in range(1000))
    path = written(tmp_path, gzip.compress(lines.encode())[:keep], "a.txt.gz")
    said = complaint(path, format="line_per_document")
    assert said.startswith(f"{path}:")
    assert "broken or ends early" in said


def test_text_that_only_says_it_is_gzip_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, b"plain", "a.txt.gz")
    assert complaint(path, format="line_per_document").startswith(f"{path}:1: the .gz file is broken")


def test_zst_is_read_in_several_frames_too(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    content = b"".join(zstandard.compress(part) for part in (b"one\ntw", b"o\n", b"", b"thr" * 100_000))
    assert texts(written(tmp_path, content, "a.txt.zst"), format="line_per_document") == ["one", "two", "thr" * 100_000]


@pytest.mark.parametrize("end", [1, 10, -1])
def test_half_a_zst_file_is_refused(tmp_path: Path, end: int) -> None:
    zstandard = pytest.importorskip("zstandard")
    whole = zstandard.compress(bytes(range(33, 120)) * 50 + b"\n")
    assert "ends early" in complaint(written(tmp_path, whole[:end], "a.txt.zst"), format="line_per_document")
    assert "ends early" in complaint(written(tmp_path, b"no zst at all", "b.txt.zst"), format="line_per_document")


@pytest.mark.parametrize(("name", "module"), [("a.txt.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    how = {"format": "line_per_document"} if name.endswith("zst") else {}
    assert f"the package {module}: pip install" in complaint(written(tmp_path, b"some", name), **how)


# JSON lines


def test_json_lines_have_the_text_in_a_field(tmp_path: Path) -> None:
    path = written(tmp_path, '{"text": "one\\ntwo"}\n\n{"id": 3, "text": "three"}\n{"text": " "}', "a.jsonl")
    assert [(d.text, d.location) for d in Corpus([path])] == [("one\ntwo", f"{path}:1"), ("three", f"{path}:3")]
    other = written(tmp_path, '{"body": "x"}', "b.json")
    assert texts(other, text_field="body") == ["x"]
    assert f"{other}:1: no field 'text'" in complaint(other)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "on', "not JSON"),
        ("[1]", 'not a JSON object; write {"text": …}'),
        ('{"texts": "x"}', "did you mean 'texts'"),
        ('{"text": null}', "not a string"),
        ('{"text": "\\ud800"}', "surrogate"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = written(tmp_path, '{"text": "fine"}\n' + line, "a.jsonl")
    found = complaint(path)
    assert found.startswith(f"{path}:2: ")
    assert said in found


# Parquet


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": ["one", "", "two"], "number": [1, 2, 3]}), path)
    return path


def test_parquet_has_the_text_in_a_column(parquet: Path) -> None:
    found = [(d.text, d.location) for d in Corpus([parquet])]
    assert found == [("one", f"{parquet}:1"), ("two", f"{parquet}:3")]
    assert "no column 'txt'; did you mean 'text'" in complaint(parquet, text_field="txt")
    assert f"{parquet}:1: field 'number' is not a string" in complaint(parquet, text_field="number")


def test_damaged_parquet_is_one_line(parquet: Path) -> None:
    parquet.write_bytes(parquet.read_bytes()[:-20])
    assert complaint(parquet).startswith(f"{parquet}:1: ")


# Datasets


class Hub:
    """Stands for the library `datasets`."""

    def __init__(self, rows: list[dict[str, object]]) -> None:
        self.rows, self.asked = rows, []

    def load_dataset(self, name: str, configuration: str | None, *, split: str, streaming: bool) -> Iterator[object]:
        self.asked.append((name, configuration, split, streaming))
        if name == "nobody/nothing":
            raise FileNotFoundError("no such dataset\nand more")
        return iter(self.rows)


def test_datasets_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub([{"text": "one"}, {"text": "two"}])
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=hub.load_dataset))
    found = list(Corpus(["datasets:us/news", "datasets:wiki@en:test"]))
    assert [d.location for d in found[1:3]] == ["datasets:us/news:2", "datasets:wiki@en:test:1"]
    assert hub.asked == [("us/news", None, "train", True), ("wiki", "en", "test", True)]
    assert complaint("datasets:us/news", text_field="body").startswith("datasets:us/news:1: no field 'body'")
    assert complaint("datasets:nobody/nothing").endswith("(no such dataset)")


def test_datasets_without_the_library_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'qkv[datasets]'" in complaint("datasets:us/news")


# Folders, and what is not there


def test_a_folder_gives_its_files_sorted_by_path(tmp_path: Path) -> None:
    for name in ("b.txt", "a/c.txt", "a/b.txt", ".hidden/a.txt", "a/.x.txt", "README.md", "a.jsonl"):
        written(tmp_path, f"{name}\n", f"in/{name}")
    written(tmp_path, gzip.compress(b"packed"), "in/a/b.txt.gz")
    assert texts(tmp_path / "in", format="line_per_document") == ["a/b.txt", "packed", "a/c.txt", "b.txt"]


def test_a_folder_without_the_format_is_refused(tmp_path: Path) -> None:
    written(tmp_path, "x", "in/a.md")
    assert "no file with the suffix .jsonl, .ndjson, .json" in complaint(tmp_path / "in", format="jsonl")
    assert "no file with the suffix" in complaint(tmp_path / "in")


def test_several_formats_may_be_given_at_once(tmp_path: Path) -> None:
    written(tmp_path, '{"text": "one"}', "in/b.jsonl")
    written(tmp_path, gzip.compress(b'{"text": "two"}'), "in/a.json.gz")
    assert texts(tmp_path / "in") == ["two", "one"]


def test_what_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    for name in ("no.txt", "no.jsonl", "no"):
        with pytest.raises(InputError, match="no such file"):
            Corpus([tmp_path / name])
    with pytest.raises(InputError, match="format 'line_per_doc' is unknown; did you mean 'line_per_document'"):
        Corpus([tmp_path], format="line_per_doc")
    with pytest.raises(InputError, match="no files"):
        Corpus([])


def test_a_corpus_begins_anew_and_knows_how_far_it_is(tmp_path: Path) -> None:
    one, two = written(tmp_path, "a\n" * 9, "1.txt"), written(tmp_path, gzip.compress(b"b\n" * 9), "2.txt.gz")
    corpus = Corpus([one, two], format="line_per_document")
    assert corpus.size == one.stat().st_size + two.stat().st_size
    reading = iter(corpus)
    next(reading)
    assert 0 < corpus.bytes_read <= 18
    assert len([*reading]) == 17
    assert corpus.bytes_read == corpus.size
    assert len([*corpus]) == 18
    said = json.loads(json.dumps(corpus.manifest()))
    assert said["files"][0] == {"name": str(one), "format": "line_per_document", "size": 18}


# Sentences


@pytest.mark.parametrize(
    "sentences",
    [
        ["One.", " Two!", " Three? ", ""],
        ['"No!"', " He said (twice).", " And…", " Then"],
        ["Mr. Smith met J. Doe in St. Ives, e.g. yesterday.", " So did I.", " Yes."],
        ["It is 3.5 m. high, i.e. tall", "\n\nNew paragraph", "\n \n  And one more."],
        ["a line\nwrapped."],
        ["\n\n  indented.", " Next.\n\n"],
        ["What?!", "  «Voilà.»", " 'Tis."],
    ],
)
def test_a_sentence_ends_where_people_would_say_so(sentences: list[str]) -> None:
    whole = [sentence for sentence in sentences if sentence]
    assert Document("".join(sentences), "here").sentences == whole


@given(st.text(st.sampled_from("aB.!?…\"') \n\r\u2003é2"), min_size=1), st.booleans())
def test_no_character_is_lost_between_sentences(text: str, by_line: bool) -> None:
    sentences = Document(text, "here", by_line).sentences
    assert "".join(sentences) == text
    assert by_line or all(sentence.strip() for sentence in sentences) or not text.strip()
    assert all(sentence[0].isspace() for sentence in sentences[1:])
