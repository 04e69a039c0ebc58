"""A person's own table: CSV, TSV or JSON lines with named columns, read with no code.

table.read("mine.csv", text="review", label="stars")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkv.data.examples import Examples, ExampleT, Label, TextExample
from qkv.data.formats.fields import id_field, require_field, string_field
from qkv.data.formats.io import ErrorPolicy, csv_records, file_suffix, json_records, tsv_records
from qkv.errors import InputError, did_you_mean, one_line

SUFFIXES = {".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".txt": "tsv"}
SUFFIXES |= {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}
FILE_TYPES = ("csv", "tsv", "jsonl")


@dataclass(frozen=True, slots=True)
class Row:
    """A record of a table: its place, and its fields by the names of their columns."""

    location: str
    fields: dict[str, Any]
    columns: Sequence[str] = ()  # of the whole table; JSON lines have none

    def text(self, name: str) -> str:
        """A field that is a string of something; numbers of a JSON file are not taken for text."""
        text = string_field(self.fields, name, self.location)
        if not text.strip():
            raise InputError(f"{self.location}: the column '{name}' is empty here; fill it in or remove the record")
        return text

    def id(self, name: str | None) -> str:
        """A field that names the record; "" if there is no such column."""
        return "" if name is None else id_field({name: require_field(self.fields, name, self.location)}, name, self.location)


def read(path: str | Path, *, skip_bad: bool = False, **options: Any) -> Examples[TextExample]:
    """All examples of a table. The options are those of `read_labeled`."""
    return collect_examples(read_labeled, Path(path), skip_bad, **options)


def collect_examples(reader: Callable[..., Iterator[ExampleT]], path: Path, skip_bad: bool, **options: Any) -> Examples[ExampleT]:
    """What a reader finds in a file, which has to be something."""
    error_policy = ErrorPolicy(skip_bad)
    try:
        examples = Examples(reader(path, error_policy, **options))
    except InputError as error:
        raise InputError(one_line(error)) from None
    examples.skipped = error_policy.errors
    if not examples and error_policy.errors:
        records = "a bad record" if len(error_policy.errors) == 1 else f"{len(error_policy.errors)} bad records, the first"
        raise InputError(f"{path}: nothing is left but {records}: {error_policy.errors[0]}")
    if not examples:
        raise InputError(f"{path}: empty, no examples in it; give a file with at least one")
    return examples


def read_labeled(
    path: Path,
    error_policy: ErrorPolicy,
    *,
    text: str = "text",
    label: str | None = "label",
    text_pair: str | None = None,
    id: str | None = None,
    group: str | None = None,
    file_type: str | None = None,
    header: bool = True,
    regression: bool = False,
    label_separator: str | None = None,
) -> Iterator[TextExample]:
    """Texts, or pairs of texts, with their labels from the columns of those names; `label=None` reads none.

    With `regression` a label is a number. With a `label_separator` an example has any number of labels, as it has where a
    JSON field is a list. Without a `header` the columns are called "1", "2", …. Examples of one `group` can be held out
    together. `file_type` is one of the FILE_TYPES where the file's name does not tell.
    """
    required = [name for name in (text, text_pair, label, id, group) if name is not None]
    for row in read_rows(path, error_policy, required=required, file_type=file_type, header=header):
        with error_policy:
            yield TextExample(
                text=row.text(text),
                location=row.location,
                text_pair=None if text_pair is None else row.text(text_pair),
                label=None if label is None else parse_label(row, label, regression, label_separator),
                id=row.id(id),
                group=row.id(group),
            )


def parse_label(row: Row, name: str, regression: bool = False, label_separator: str | None = None) -> Label:
    """A field as a label; JSON's numbers and truth values get the names that a CSV file would give them."""
    value = require_field(row.fields, name, row.location)
    if regression:
        return parse_number(value, row.location, name)
    if isinstance(value, list):
        return tuple(_class_name(item, name, row.location) for item in value)
    if label_separator is not None and isinstance(value, str):
        return tuple(item.strip() for item in value.split(label_separator) if item.strip())
    return _class_name(value, name, row.location)


def parse_number(value: Any, location: str, name: str) -> float:
    """A number that can be regressed."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{location}: the column '{name}' holds {value!r}, which is no number; correct it")
    return number


def _class_name(value: Any, name: str, location: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float) and not math.isnan(value):  # what a table without a value there becomes in JSON
        return str(value)
    label = "" if value is None or isinstance(value, float) else string_field({name: value}, name, location).strip()
    if not label:
        raise InputError(f"{location}: the label '{name}' is empty; fill it in or remove the record")
    return label


def read_rows(
    path: Path,
    error_policy: ErrorPolicy,
    *,
    required: Iterable[str] = (),
    file_type: str | None = None,
    header: bool = True,
    allow_short_rows: bool = False,
) -> Iterator[Row]:
    """The records of a table that has the columns that are `required`.

    With `allow_short_rows` a record may be shorter or longer than the header: then it lacks fields, or loses the last.
    """
    file_type = file_type or _infer_file_type(path)
    if file_type not in FILE_TYPES:
        raise InputError(f"{path}: the form '{file_type}' of a table is unknown; {did_you_mean(file_type, FILE_TYPES)}")
    if file_type == "jsonl":
        yield from (Row(location, record) for location, record in json_records(path, error_policy))
        return
    columns: list[str] | None = None
    num_errors_before = len(error_policy.errors)
    for location, fields in (csv_records if file_type == "csv" else tsv_records)(path, error_policy):
        if columns is None:
            if header and len(error_policy.errors) > num_errors_before:  # it was the header that was skipped
                raise InputError(error_policy.errors[num_errors_before])
            columns = _check_columns(fields, location, required, header)
            if header:
                continue
        with error_policy:
            if len(fields) != len(columns) and not allow_short_rows:
                raise field_count_error(location, fields, columns)
            yield Row(location, dict(zip(columns, fields, strict=False)), columns)


def field_count_error(location: str, fields: Sequence[str], columns: Sequence[str]) -> InputError:
    """A record that has too few fields, or too many."""
    field_count = f"{len(fields)} field{'s' if len(fields) > 1 else ''}"
    return InputError(f"{location}: {field_count} where the table has {len(columns)} columns; repair the record")


def missing_column_error(location: str, name: str, columns: Iterable[str]) -> InputError:
    """A column that is not there; where the whole line was taken for one column, what it seems to be written in."""
    column_names = list(columns)
    if column_names and column_names[0].startswith("{"):
        return InputError(f"{location}: no column '{name}', but JSON; give the format jsonl")
    separator = next((character for character in (";", "\t", "|", ",") if len(column_names) == 1 and character in column_names[0]), None)
    if separator is not None:
        separator_name = "tabs" if separator == "\t" else f"'{separator}'"
        remedy = {"\t": "give the format tsv", ",": "give the format csv"}.get(separator, "convert it")
        return InputError(f"{location}: no column '{name}'; it has {separator_name} where csv has commas and tsv tabs; {remedy}")
    return InputError(f"{location}: no column '{name}'; the columns are: {', '.join(column_names)}")


def _check_columns(fields: list[str], location: str, required: Iterable[str], header: bool) -> list[str]:
    columns = [name.strip() for name in fields] if header else [str(number + 1) for number in range(len(fields))]
    for name in required:
        if name not in columns:
            raise missing_column_error(location, name, columns)
        if columns.count(name) > 1:
            raise InputError(f"{location}: {columns.count(name)} columns are called '{name}'; rename all but one")
    return columns


def _infer_file_type(path: Path) -> str:
    file_type = SUFFIXES.get(file_suffix(path))
    if file_type is None:
        raise InputError(f"{path}: its name does not tell its form; end it in {', '.join(SUFFIXES)} or name the form")
    return file_type
