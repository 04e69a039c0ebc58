"""Long lines, bombs and special files are refused in one line, before they fill the memory."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
import zstandard
from task_files import refused, written

from qkv.data.formats import FORMATS, read
from qkv.errors import InputError


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that small files exceed."""
    for name, value in {"LINE_BYTES": 1000, "EMPTY_LINES": 100, "RECORD_LINES": 50, "DATA_JSON_BYTES": 5000}.items():
        monkeypatch.setenv(f"QKV_LIMIT_{name}", str(value))


def refused_in_one_line(format: str, path: Path, options: dict[str, str]) -> None:
    with pytest.raises(InputError) as problem:
        read(format, path, **options)
    assert "\n" not in str(problem.value)
    assert len(str(problem.value)) < len(str(path.parent)) * 2 + 400


PACK = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress, "": lambda content: content}
LINE_FORMATS = {"csv": "csv", "tsv": "tsv", "jsonl": "jsonl", "words": "jsonl", "conll": "conll", "conllu": "conllu"}
LINE_FORMATS |= {"pairs:tsv": "tsv", "questions": "jsonl", "goemotions": "tsv", "glue:RTE": "tsv", "cmudict": "dict"}


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("format", LINE_FORMATS)
def test_a_long_line_and_many_empty_lines_are_refused(tmp_path: Path, format: str, packing: str) -> None:
    name = f"a.{LINE_FORMATS[format]}{packing}"
    path = written(tmp_path / name, PACK[packing](b"x" * 100_000))
    refused(
        f"{path}:1", "the line has too many bytes; the limit is 1,000; QKV_LIMIT_LINE_BYTES raises it", format, path
    )
    path = written(tmp_path / name, PACK[packing](b"\n" * 100_000))
    refused(f"{path}:101", "too many empty lines in succession", format, path)


def test_a_quotation_mark_that_opens_a_long_record_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", 'text,label\n"a\n' + "b\n" * 1000)
    refused(f"{path}:2", "51 lines and .* bytes; check its quotation marks .*QKV_LIMIT_RECORD_LINES", "csv", path)
    path = written(tmp_path / "a.csv", 'text,label\n"a\n' + f"{'b' * 500}\n" * 10)
    refused(f"{path}:2", "check its quotation marks .*QKV_LIMIT_LINE_BYTES", "csv", path)


def test_a_sentence_and_a_json_document_have_limits(tmp_path: Path) -> None:
    refused(f"{tmp_path / 'a.conll'}:1", "too many bytes", "conll", written(tmp_path / "a.conll", "word O\n" * 1000))
    path = written(tmp_path / "a.json", "[" + " " * 10_000 + "]")
    refused(str(path), "the file has too many bytes; the limit is 5,000", "squad", path)


@pytest.mark.parametrize("format", sorted(FORMATS.names()))
def test_every_format_refuses_devices_and_impossible_names_in_one_line(tmp_path: Path, format: str) -> None:
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    (tmp_path / "mem.csv").symlink_to("/proc/self/mem")
    for path in (tmp_path / "zero.csv", tmp_path / "mem.csv", tmp_path / ("x" * 300), tmp_path / "a\0b"):
        options = {"targets": str(path)} if format == "aligned" else {}
        refused_in_one_line(format, path, options)


def test_a_named_pipe_without_a_writer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv.files._FIFO_SECONDS", 0.05)
    os.mkfifo(tmp_path / "a.csv")
    refused(str(tmp_path / "a.csv"), "a named pipe that nobody writes to", "csv", tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("name", "content", "format"),
    [
        ("a.csv", "x" * 900 + ",y\n1,2\n", "csv"),
        ("a.jsonl", '{"' + "k" * 900 + '": 1}\n', "jsonl"),
        ("a.jsonl", '{"text": "a", "label": {"' + "k" * 900 + '": 1}}\n', "jsonl"),
        ("a.conll", "a B-x\nb " + "T" * 900 + "\n", "conll"),
        ("a.conllu", "9" * 900 + "\ta\t_\tX\t_\t_\t_\t_\t_\t_\n", "conllu"),
        ("a.dict", "w" * 900 + "\n", "cmudict"),
        ("a.tsv", "a\t" + "9" * 900 + "\tid\n", "goemotions"),
    ],
)
def test_a_message_quotes_little_of_a_file(tmp_path: Path, name: str, content: str, format: str) -> None:
    refused_in_one_line(format, written(tmp_path / name, content), {})
