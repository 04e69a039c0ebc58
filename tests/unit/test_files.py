"""Files, JSON and YAML that somebody else wrote: whatever is in them, they are read or refused in one line."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from qkv import files
from qkv.errors import InputError, quote
from qkv.files import parse_json, parse_yaml, read_file, read_json, read_text_file, read_yaml


def refused(pattern: str, action: Any, *arguments: Any) -> str:
    with pytest.raises(InputError, match=pattern) as problem:
        action(*arguments)
    message = str(problem.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


# ---- JSON -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("", "^f: not JSON: it is empty|^f, column 1: not JSON: it is empty"),
        ("[1,2", "column 5: not JSON: .* it ends here"),
        ('{"a":\n 1,}', "f, line 2, column 4: not JSON"),
        ('"a\0"', r"at '\\0\"'"),
        ("[" * 20000, "nested too deeply; the limit is 100; QKV_LIMIT_NESTING raises it"),
        ("[" * 101 + "]" * 101, "nested too deeply"),
        ('{"a":' * 3000, "nested too deeply"),
        ("9" * 5000, "a number has 5,000 digits, '9999999999999999999…'; the limit is 400"),
        ("[" + "1," * 9 + "9" * 401 + "]", "401 digits"),
        ("1." + "0" * 500, "digits"),
        ("1e999", "'1e999' is too large"),
        ("[NaN]", "NaN is not a JSON number"),
        ("-Infinity", "-Infinity is not a JSON number"),
        ('"\\ud800"', r"\\ud800 is half of a surrogate pair"),
        ('{"\\ude00": 1}', "half of a surrogate pair"),
    ],
)
def test_json_that_cannot_be_used_is_refused_with_its_place(text: str, pattern: str) -> None:
    refused(pattern, parse_json, text, "f")


@pytest.mark.parametrize(
    "text",
    ["[" * 100 + "]" * 100, '"\\ud83d\\ude00"', '"\\\\ud83d"', "9" * 400, "1e308", '{"a": 1, "a": 2}'],
)
def test_unusual_json_is_read_as_python_reads_it(text: str) -> None:
    assert parse_json(text, "f") == json.loads(text)


def test_nan_is_read_where_our_own_logs_have_it() -> None:
    assert parse_json("[NaN, Infinity]", "f", allow_nan=True)[1] == float("inf")


def test_json_bytes_may_have_a_byte_order_mark_and_must_be_utf8() -> None:
    assert parse_json(b"\xef\xbb\xbf[1]", "f") == [1]
    refused("f, line 2: byte 0xFF is not UTF-8", parse_json, b"[\n\xff]", "f")


def test_a_limit_is_raised_by_its_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_LIMIT_NESTING", "200")
    assert parse_json("[" * 150 + "]" * 150, "f")
    monkeypatch.setenv("QKV_LIMIT_NESTING", "many")
    refused("QKV_LIMIT_NESTING must be a whole number, not 'many'", parse_json, "[" * 150 + "]" * 150, "f")


# ---- YAML -----------------------------------------------------------------------------------------------------------


def laughs(template: str) -> str:
    """Return nested aliases that stand for 9 ** 9 values."""
    chain = zip("abcdefgh", "bcdefghi", strict=True)
    return "a: &a [x]\n" + "".join(template.format(new, ",".join([f"*{old}"] * 9)) for old, new in chain)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (laughs("{0}: &{0} [{1}]\n"), r"line \d, .*too many values; the limit is 100,000"),
        (laughs("{0}: &{0} {{<<: [{1}]}}\n"), "too many values"),
        ("a: &a x\nb: [" + "*a, " * 101 + "]\n", "too many aliases; the limit is 100"),
        ("a: &a [*a]", r"'\*a' refers to itself"),
        ("b: 1\na: !!timestamp x\n", "line 2, column 4: not YAML: the tag '!!timestamp' is not allowed"),
        ("a: !!python/object/apply:os.system [x]", "the tag '!!python/object/apply:os.system' is not allowed"),
        ("a: !!binary x", "not allowed"),
        ("a: !!int x", "'x' is no value of type int"),
        ("a: !!int ''", "no value of type int"),
        ("a: !!bool maybe", "no value of type bool"),
        ("a: " + "9" * 5000, "5,000 digits"),
        ("a: " + ":".join(["1"] * 3000), "digits"),
        ("[" * 2000, "nested too deeply"),
        ("- " * 2000, "nested too deeply"),
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: .*'a' occurs twice"),
        ("[a]: 3", "a key must be a text"),
        ("yes: 3", "'yes' must be a text; put it in quotation marks"),
        ("a: \0", "not YAML"),
        ("a: \ud800", "UTF-8"),
        ("a: [\nb", "line 3|line 2"),
        ("--- a\n--- b\n", "another document"),
    ],
)
def test_yaml_that_cannot_be_used_is_refused_with_its_place(text: str, pattern: str) -> None:
    start = time.monotonic()
    refused(pattern, parse_yaml, text, "f")
    assert time.monotonic() - start < 2


def test_dates_are_texts_and_merge_keys_work() -> None:
    assert parse_yaml("2024-01-01: 2024-02-02", "f") == {"2024-01-01": "2024-02-02"}
    text = "base: &b {x: 1, y: 2}\nrun:\n  <<: *b\n  y: 3\n"
    assert parse_yaml(text, "f")["run"] == {"x": 1, "y": 3}


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("/dev/zero", "/dev/zero: is a device"),
        ("/dev/full", "is a device"),
        ("/proc/self/mem", "/proc/self/mem: cannot be opened or read"),
        ("x" * 5000, "^x{100}…x{100}: cannot be opened or read: file name too long"),
        ("a\0b", r"a\\0b: cannot be opened"),
        ("/nowhere/file", "/nowhere/file: no such file or folder"),
        ("/tmp", "/tmp: is a folder"),
    ],
)
def test_a_special_file_is_refused_in_one_line(path: str, pattern: str) -> None:
    for read in (read_file, read_json, read_text_file, read_yaml):
        refused(pattern, read, path)


def test_an_unreadable_file_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:  # as root, every file can be read
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    refused("no permission to open it", read_file, tmp_path / "a")


def test_a_named_pipe_needs_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_FIFO_SECONDS", 0.2)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refused("a named pipe that nobody writes to", read_json, pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("[1]"))
    writer.start()
    assert read_json(pipe) == [1]
    writer.join()


def test_a_slow_writer_of_a_named_pipe_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_FIFO_SECONDS", 0.1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write() -> None:
        with open(pipe, "w") as file:
            time.sleep(0.4)
            file.write("[2]")

    writer = threading.Thread(target=write)
    writer.start()
    time.sleep(0.05)
    assert read_json(pipe) == [2]
    writer.join()


def test_a_pipe_without_a_name_and_the_empty_device_are_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"[3]")
    os.close(writing)
    assert read_json(f"/dev/fd/{reading}") == [3]
    os.close(reading)
    assert read_file("/dev/null") == b""


def test_a_file_over_the_limit_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_LIMIT_CONFIG_BYTES", "10")
    (tmp_path / "a").write_bytes(b"[" + b" " * 8 + b"]")
    assert read_json(tmp_path / "a") == []
    (tmp_path / "a").write_bytes(b" " * 11)
    message = "a: the file has too many bytes; the limit is 10; QKV_LIMIT_CONFIG_BYTES raises it"
    refused(re.escape(message), read_json, tmp_path / "a")


def test_foreign_content_in_a_message_is_short_and_printable() -> None:
    assert quote("a\nb\t\x1b[31m") == "'a\\nb\\t�[31m'"
    assert len(quote("x" * 10**6)) == 62
    assert quote([1] * 1000).endswith("…")
    assert quote(-1) == "-1"
