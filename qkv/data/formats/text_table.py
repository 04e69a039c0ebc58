"""Rows of a text file with delimited fields: columns by name, and records with too many or too few fields."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from qkv.data.formats.dialect import (
    TAB,
    Dialect,
    RememberedDelimiter,
    count_unnamed_columns,
    detect_dialect,
    has_columns,
    normalize_delimiter,
)
from qkv.data.formats.fields import id_field, require_field, string_field
from qkv.data.formats.io import ErrorPolicy, Line, parse_csv, split_records
from qkv.errors import InputError, quote

_SAMPLE_LINES, _SAMPLE_BYTES = 1000, 2**20  # from which the delimiter is detected
_MAX_LISTED_COLUMNS, _MAX_COMPARED_COLUMNS = 20, 1000
_NUMBER = re.compile(r"[+-]?\d+([.,]\d+)?")
_QUOTED_FIELD = re.compile(r'(?:^|\t)"[^\t]*""[^\t]*"(?:\t|$)')  # as CSV writes a field with quotation marks
_MIN_SIMILARITY = 0.8  # of a mistyped name and the column meant
_LONG_NAME = 60  # characters; a longer field of the first line is hardly the name of a column


@dataclass(frozen=True, slots=True)
class Row:
    """A record of a table: its location, and its fields by column name."""

    location: str
    fields: dict[str, Any]
    columns: Sequence[str] = ()  # all columns of the table; empty for JSON lines

    def text(self, name: str) -> str:
        """Return a field that is a string and not blank; the numbers of a JSON file are not text."""
        value = require_field(self.fields, name, self.location)
        is_missing = value is None or value != value  # NaN, as pandas marks a missing value
        text = "" if is_missing else string_field(self.fields, name, self.location)
        if not text.strip():
            raise InputError(f"{self.location}: the column '{name}' is empty here; fill it in or remove the record")
        return text

    def id(self, name: str | None) -> str:
        """Return the field with the id of the record; "" if `name` is None."""
        if name is None:
            return ""
        return id_field({name: require_field(self.fields, name, self.location)}, name, self.location)


@dataclass
class _Count:
    """Number of records, and the location of the first."""

    number: int = 0
    first: str = ""

    def add(self, location: str) -> None:
        self.number += 1
        self.first = self.first or location


@dataclass
class TextTable:
    """Reads the rows of a text file; counts records whose number of fields is not that of the header."""

    path: Path
    error_policy: ErrorPolicy
    required: Sequence[str]
    optional: Sequence[str]
    header: bool
    allow_short_rows: bool
    column_options: Mapping[str, str] = field(default_factory=dict)  # the command's option that names a column
    _long_rows: _Count = field(default_factory=_Count)
    _short_rows: _Count = field(default_factory=_Count)
    _max_fields: int | None = None  # fields that a record may fill; None: any number

    def iter_rows(self, lines: Iterator[Line], file_delimiter: str, delimiter: str | None) -> Iterator[Row]:
        """Yield the rows; `delimiter` None is detected and, if it is not the file type's, noted."""
        sample = _take_sample(lines)
        dialect = self._choose_dialect(sample, file_delimiter, delimiter)
        split = parse_csv if dialect.quoted else split_records
        num_errors_before = len(self.error_policy.errors)
        columns: list[str] | None = None
        in_use: list[str] = []
        for location, fields in split(chain(sample, lines), self.error_policy, delimiter=dialect.delimiter):
            if columns is None:
                if self.header and len(self.error_policy.errors) > num_errors_before:  # the skipped line was the header
                    raise InputError(self.error_policy.errors[num_errors_before])
                columns = self._parse_header(fields, location, dialect)
                in_use = [*self.required, *(name for name in self.optional if name in columns)]
                self._max_fields = self._count_fields(sample, dialect, len(columns))
                if self.header:
                    continue
            with self.error_policy:
                self._check_fields(fields, columns, in_use, dialect, location)
                row = Row(location, dict(zip(columns, fields, strict=False)), columns)
                self.error_policy.record_row(location, row.fields)
                yield row
        self._note_ragged_rows()

    def _choose_dialect(self, sample: Sequence[Line], file_delimiter: str, delimiter: str | None) -> Dialect:
        texts = _decode_sample(sample)
        preferred: Dialect | None = None
        if delimiter is not None:
            character = normalize_delimiter(delimiter)
            preferred = Dialect(character, quoted=not file_delimiter == character == TAB)
            if not isinstance(delimiter, RememberedDelimiter) or self._has_columns(texts, preferred):
                return preferred
        dialect = detect_dialect(texts, file_delimiter, self.required, self.header)
        if preferred is not None and not self._has_columns(texts, dialect):
            return preferred
        is_default = preferred is None and dialect.delimiter == file_delimiter
        if not dialect.quoted and any(_QUOTED_FIELD.search(text) for text in texts):
            remedy = "if they enclose fields, set the format csv and the delimiter tab"
            self.error_policy.notes.append(f"{self.path}: quotation marks are kept as they are; {remedy}")
        self.error_policy.record_option(self.path, "delimiter", dialect.delimiter, is_default=is_default)
        return dialect

    def _has_columns(self, texts: Sequence[str], dialect: Dialect) -> bool:
        return has_columns(texts, dialect, self.required, self.header)

    def _count_fields(self, sample: Sequence[Line], dialect: Dialect, num_columns: int) -> int | None:
        """Return how many fields a record may fill: a text that a delimiter has cut fills too many."""
        if dialect.delimiter not in f"{TAB}|":
            return num_columns
        if not self.header:  # the first row need not have all columns
            return None
        return num_columns + count_unnamed_columns(_decode_sample(sample), dialect, num_columns)

    def _parse_header(self, fields: list[str], location: str, dialect: Dialect) -> list[str]:
        numbers = [str(number + 1) for number in range(len(fields))]
        columns = [name.strip() for name in fields] if self.header else numbers
        for name in self.required:
            if name not in columns:
                option = self.column_options.get(name)
                raise missing_column_error(location, name, columns, dialect.delimiter, option)
            if columns.count(name) > 1:
                raise InputError(
                    f"{location}: {columns.count(name)} columns have the name '{name}'; rename all but one"
                )
        # a second column of a name that is not in use must not replace the first
        return [name if name not in columns[:i] else f"{name}.{i + 1}" for i, name in enumerate(columns)]

    def _check_fields(
        self, fields: Sequence[str], columns: Sequence[str], in_use: Sequence[str], dialect: Dialect, location: str
    ) -> None:
        """Refuse a record that lacks a column in use, or that a delimiter inside a text may have shifted."""
        if len(fields) > len(columns):
            surplus = [] if self._max_fields is None else fields[self._max_fields :]
            if any(map(str.strip, surplus)) and not self.allow_short_rows:
                remedy = f"put a text with '{dialect.delimiter}' in quotation marks, or repair the record"
                if not dialect.quoted:
                    remedy = "remove a tab inside a text, or repair the record"
                raise field_count_error(location, fields, columns, remedy)
            self._long_rows.add(location)
        elif len(fields) < len(columns) and not self.allow_short_rows:
            missing = next((name for name in in_use if columns.index(name) >= len(fields)), None)
            if missing is not None:
                raise field_count_error(location, fields, columns, f"'{missing}' is missing; repair the record")
            self._short_rows.add(location)

    def _note_ragged_rows(self) -> None:
        for rows, problem in ((self._long_rows, "more"), (self._short_rows, "fewer")):
            if rows.number:
                count = f"{rows.number:,} row{'s have' if rows.number > 1 else ' has'}"
                first = f"the first: line {rows.first.rpartition(':')[2]}"
                effect = "the surplus is ignored" if problem == "more" else "no column in use is missing"
                note = f"{self.path}: {count} {problem} fields than {'the header' if self.header else 'the first row'}"
                self.error_policy.notes.append(f"{note} ({first}); {effect}")


def _take_sample(lines: Iterator[Line]) -> list[Line]:
    sample: list[Line] = []
    num_bytes = 0
    while len(sample) < _SAMPLE_LINES and num_bytes < _SAMPLE_BYTES and (line := next(lines, None)) is not None:
        sample.append(line)
        num_bytes += len(line[1])
    return sample


def _decode_sample(sample: Sequence[Line]) -> list[str]:
    return [raw.decode("utf-8", "replace") for _, raw in sample]


def field_count_error(
    location: str, fields: Sequence[str], columns: Sequence[str], remedy: str = "repair the record"
) -> InputError:
    """Return the error for a record with too few or too many fields."""
    field_count = f"{len(fields)} field{'s' if len(fields) > 1 else ''}"
    column_count = f"{len(columns)} column{'s' if len(columns) > 1 else ''}"
    return InputError(f"{location}: {field_count} where the table has {column_count}; {remedy}")


def missing_column_error(
    location: str, name: str, columns: Iterable[str], delimiter: str | None = None, option: str | None = None
) -> InputError:
    """Return the error for a missing column, with a hint if the file seems to have no header or another delimiter.

    `option` is the option of the command that names the column.
    """
    names = list(columns)
    if names and names[0].startswith("{"):
        return InputError(f"{location}: no column '{name}', but JSON; give the format jsonl")
    separators = [character for character in f";{TAB}|," if character != delimiter] if len(names) == 1 else []
    separator = next((character for character in separators if character in names[0]), None)
    if separator is not None and delimiter is not None:
        separator_name = "tabs" if separator == TAB else f"'{separator}'"
        remedy = f"give --delimiter {'tab' if separator == TAB else repr(separator)}, or the names of its columns"
        return InputError(f"{location}: no column '{name}'; the file has {separator_name}; {remedy}")
    naming = f" ({option} names the column)" if option is not None else ""
    listed = ", ".join(quote(column)[1:-1] for column in names[:_MAX_LISTED_COLUMNS])
    more = f" and {len(names) - _MAX_LISTED_COLUMNS} more" if len(names) > _MAX_LISTED_COLUMNS else ""
    no_header = any(len(column) > _LONG_NAME or _NUMBER.fullmatch(column.strip()) for column in names)
    hint = "; if the file has no header, set header: false and number the columns from 1" if no_header else ""
    similar = None if no_header else _similar_column(name, names)
    if similar is not None:
        return InputError(f"{location}: no column '{name}'; did you mean {quote(similar)}?{naming}")
    return InputError(f"{location}: no column '{name}'; the columns are: {listed}{more}{naming}{hint}")


def _similar_column(name: str, columns: Sequence[str]) -> str | None:
    """Return the column that differs from a name in case or a letter; "date" is not similar to the default "text"."""
    by_key = {column[:_LONG_NAME].casefold(): column for column in columns[:_MAX_COMPARED_COLUMNS]}
    matches = difflib.get_close_matches(name[:_LONG_NAME].casefold(), by_key, n=1, cutoff=_MIN_SIMILARITY)
    return by_key[matches[0]] if matches else None
