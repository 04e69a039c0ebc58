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

from qkv.data.corpus import unpacked
from qkv.data.readers import json_object
from qkv.errors import InputError, in_one_line

PACKED = (".gz", ".zst")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LONGEST_FIELD = 2**31 - 1


class Bad:
    """What becomes of bad input met inside `with bad:`: it is raised or, with `skip`, its reason is kept.

    What makes a whole file unreadable, such as a missing column, is raised outside and never skipped.
    """

    def __init__(self, skip: bool = False) -> None:
        self.skip = skip
        self.reasons: list[str] = []

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not self.skip or not isinstance(error, InputError):
            return False
        self.reasons.append(in_one_line(error))
        return True


def ending(path: Path) -> str:
    """The name's ending below that of its packing: ".csv" of "a.csv.gz"."""
    return (path.with_suffix("") if path.suffix.lower() in PACKED else path).suffix.lower()


def raw_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Each line's place and its bytes without their end."""
    number = 0
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(unpacked(file, str(path)), 1):
                line = raw.removeprefix(_BYTE_ORDER_MARK) if number == 1 else raw
                yield f"{path}:{number}", line.removesuffix(b"\n").removesuffix(b"\r")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; check the path") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        said = f"the {path.suffix.lower()} file is broken or ends early here; copy it again"
        raise InputError(f"{path}:{number + 1}: {said}") from None
    except OSError as problem:
        said = f"cannot read on ({problem.strerror}); give a readable file"
        raise InputError(f"{path}:{number + 1}: {said}") from None


def decoded(raw: bytes, where: str) -> str:
    """The text of a line; a byte that is not UTF-8, or not of a text at all, is named."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        byte = f"byte {problem.start + 1} of the line, 0x{raw[problem.start]:02X}"
        raise InputError(f"{where}: {byte}, is not UTF-8; save the whole file as UTF-8") from None
    if "\0" in text:
        byte = f"byte {raw.index(0) + 1} of the line, 0x00"
        raise InputError(f"{where}: {byte}, stands in no text; remove it, or save the whole file as UTF-8")
    return text


def lines(path: Path, bad: Bad) -> Iterator[tuple[str, str]]:
    """Each line's place and text."""
    for where, raw in raw_lines(path):
        with bad:
            yield where, decoded(raw, where)


def blocks(path: Path) -> Iterator[list[tuple[str, bytes]]]:
    """The runs of lines between blank ones, still in bytes: a sentence with one bad line is bad as a whole."""
    block: list[tuple[str, bytes]] = []
    for where, raw in raw_lines(path):
        if raw.strip():
            block.append((where, raw))
        elif block:
            yield block
            block = []
    if block:
        yield block


def tab_records(path: Path, bad: Bad) -> Iterator[tuple[str, list[str]]]:
    """The fields between the tabs of each line that is not blank; a quotation mark is a character like any other."""
    return ((where, line.split("\t")) for where, line in lines(path, bad) if line.strip())


def comma_records(path: Path, bad: Bad, *, blank: bool = False) -> Iterator[tuple[str, list[str]]]:
    """The records of a CSV file (RFC 4180), each with the place of its first line: a quoted field may hold many.

    A `blank` line may be a record of one empty field; else there is none.
    """
    csv.field_size_limit(_LONGEST_FIELD)  # the library's own is 131,072 characters: less than a long document
    taken: list[tuple[str, bytes]] = []  # the lines of the record that is being read

    def feed() -> Iterator[str]:
        for where, raw in raw_lines(path):
            taken.append((where, raw))
            # A byte that cannot be decoded must not end the record that it stands in: complained of below.
            yield raw.decode("utf-8", "surrogateescape") + "\n"

    reader = csv.reader(feed(), strict=True)
    while True:
        taken.clear()
        broken: csv.Error | None = None
        try:
            record = next(reader, None)
        except csv.Error as problem:
            record, broken = [], problem
        if record is None:
            return
        with bad:
            for where, raw in taken:
                decoded(raw, where)
            if broken is not None:
                raise InputError(f"{taken[0][0]}: {_broken(broken, len(taken))}")
            if record or blank:
                yield taken[0][0], record or [""]


def _broken(problem: csv.Error, taken: int) -> str:
    """What is wrong with a record of CSV that took so many lines."""
    if "new-line" in str(problem):
        return "not CSV (a carriage return alone ends a line); save the file with a newline behind each"
    ended = "unexpected end" in str(problem) and taken > 1
    more = f", it took all {taken:,} lines to the end of the file" if ended else ""
    return f"not CSV ({problem}{more}); check the record's quotation marks"


def objects(path: Path, bad: Bad, wanted: str = '{"text": …}') -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of JSON lines, or of one JSON list where the name ends in .json and the file begins with one."""
    if ending(path) == ".json" and next((raw for _, raw in raw_lines(path) if raw.strip()), b"").lstrip()[:1] == b"[":
        for number, record in enumerate(document(path), 1):
            where = f"{path}: record {number}"
            with bad:
                if not isinstance(record, dict):
                    raise InputError(f"{where}: not a JSON object; write {wanted}")
                yield where, record
        return
    for where, line in lines(path, bad):
        if line.strip():
            with bad:
                yield where, json_object(line, where, wanted)


def document(path: Path) -> Any:
    """A file that is one JSON value."""
    text = "\n".join(line for _, line in lines(path, Bad()))
    if not text.strip():
        raise InputError(f"{path}: empty, no JSON in it; give a file with at least one example")
    try:
        return json.loads(text)
    except json.JSONDecodeError as problem:
        said = f"not JSON ({problem.msg} at column {problem.colno}); repair the file or copy it again"
        raise InputError(f"{path}:{problem.lineno}: {said}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, a thousand brackets
        raise InputError(f"{path}: JSON too long or too deep to read; repair the file") from None
