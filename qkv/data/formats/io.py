"""Lines, tables and JSON out of files that people made, and what becomes of those that are bad.

Files are UTF-8, plain or packed (.gz, .zst, by the name's ending); a byte order mark and Windows line ends are
tolerated. A line ends at a newline character only.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from qkv.data.compression import decompressed_lines
from qkv.data.formats.fields import parse_json_object
from qkv.errors import InputError, one_line

COMPRESSED = (".gz", ".zst")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MAX_FIELD_CHARACTERS = 2**31 - 1


class ErrorPolicy:
    """What becomes of bad input met inside `with error_policy:`: it is raised or, with `skip`, its reason is kept.

    What makes a whole file unreadable, such as a missing column, is raised outside and never skipped.
    """

    def __init__(self, skip: bool = False) -> None:
        self.skip = skip
        self.errors: list[str] = []

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not self.skip or not isinstance(error, InputError):
            return False
        self.errors.append(one_line(error))
        return True


def file_suffix(path: Path) -> str:
    """The name's ending below that of its packing: ".csv" of "a.csv.gz"."""
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path).suffix.lower()


def read_raw_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Each line's place and its bytes without their end."""
    number = 0
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(decompressed_lines(file, str(path)), 1):
                line = raw.removeprefix(_BYTE_ORDER_MARK) if number == 1 else raw
                yield f"{path}:{number}", line.removesuffix(b"\n").removesuffix(b"\r")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; check the path") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        reason = f"the {path.suffix.lower()} file is broken or ends early here; copy it again"
        raise InputError(f"{path}:{number + 1}: {reason}") from None
    except OSError as problem:
        reason = f"cannot read on ({problem.strerror}); give a readable file"
        raise InputError(f"{path}:{number + 1}: {reason}") from None


def decode_line(raw: bytes, location: str) -> str:
    """The text of a line; a byte that is not UTF-8, or not of a text at all, is named."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        byte = f"byte {problem.start + 1} of the line, 0x{raw[problem.start]:02X}"
        raise InputError(f"{location}: {byte}, is not UTF-8; save the whole file as UTF-8") from None
    if "\0" in text:
        byte = f"byte {raw.index(0) + 1} of the line, 0x00"
        raise InputError(f"{location}: {byte}, stands in no text; remove it, or save the whole file as UTF-8")
    return text


def read_lines(path: Path, error_policy: ErrorPolicy) -> Iterator[tuple[str, str]]:
    """Each line's place and text."""
    for location, raw in read_raw_lines(path):
        with error_policy:
            yield location, decode_line(raw, location)


def read_blocks(path: Path) -> Iterator[list[tuple[str, bytes]]]:
    """The runs of lines between blank ones, still in bytes: a sentence with one bad line is bad as a whole."""
    block: list[tuple[str, bytes]] = []
    for location, raw in read_raw_lines(path):
        if raw.strip():
            block.append((location, raw))
        elif block:
            yield block
            block = []
    if block:
        yield block


def tsv_records(path: Path, error_policy: ErrorPolicy) -> Iterator[tuple[str, list[str]]]:
    """The fields between the tabs of each line that is not blank; a quotation mark is a character like any other."""
    return ((location, line.split("\t")) for location, line in read_lines(path, error_policy) if line.strip())


def csv_records(path: Path, error_policy: ErrorPolicy, *, keep_blank: bool = False) -> Iterator[tuple[str, list[str]]]:
    """The records of a CSV file (RFC 4180), each with the place of its first line: a quoted field may hold many.

    With `keep_blank` a blank line is a record of one empty field; else there is none.
    """
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)  # the library's own is 131,072 characters: less than a long document
    record_lines: list[tuple[str, bytes]] = []  # the lines of the record that is being read

    def feed_lines() -> Iterator[str]:
        for location, raw in read_raw_lines(path):
            record_lines.append((location, raw))
            # A byte that cannot be decoded must not end the record that it stands in: complained of below.
            yield raw.decode("utf-8", "surrogateescape") + "\n"

    reader = csv.reader(feed_lines(), strict=True)
    while True:
        record_lines.clear()
        csv_error: csv.Error | None = None
        try:
            record = next(reader, None)
        except csv.Error as problem:
            record, csv_error = [], problem
        if record is None:
            return
        with error_policy:
            for location, raw in record_lines:
                decode_line(raw, location)
            if csv_error is not None:
                raise InputError(f"{record_lines[0][0]}: {_csv_error_message(csv_error, len(record_lines))}")
            if record or keep_blank:
                yield record_lines[0][0], record or [""]


def _csv_error_message(problem: csv.Error, num_lines: int) -> str:
    """What is wrong with a record of CSV that took so many lines."""
    if "new-line" in str(problem):
        return "not CSV (a carriage return alone ends a line); save the file with a newline behind each"
    reached_end = "unexpected end" in str(problem) and num_lines > 1
    more = f", it took all {num_lines:,} lines to the end of the file" if reached_end else ""
    return f"not CSV ({problem}{more}); check the record's quotation marks"


def json_records(path: Path, error_policy: ErrorPolicy, expected: str = '{"text": …}') -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of JSON lines, or of one JSON list where the name ends in .json and the file begins with one."""
    if file_suffix(path) == ".json" and next((raw for _, raw in read_raw_lines(path) if raw.strip()), b"").lstrip()[:1] == b"[":
        for number, record in enumerate(read_json(path), 1):
            location = f"{path}: record {number}"
            with error_policy:
                if not isinstance(record, dict):
                    raise InputError(f"{location}: not a JSON object; write {expected}")
                yield location, record
        return
    for location, line in read_lines(path, error_policy):
        if line.strip():
            with error_policy:
                yield location, parse_json_object(line, location, expected)


def read_json(path: Path) -> Any:
    """A file that is one JSON value."""
    text = "\n".join(line for _, line in read_lines(path, ErrorPolicy()))
    if not text.strip():
        raise InputError(f"{path}: empty, no JSON in it; give a file with at least one example")
    try:
        return json.loads(text)
    except json.JSONDecodeError as problem:
        reason = f"not JSON ({problem.msg} at column {problem.colno}); repair the file or copy it again"
        raise InputError(f"{path}:{problem.lineno}: {reason}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, a thousand brackets
        raise InputError(f"{path}: JSON too long or too deep to read; repair the file") from None
