"""Reader of tables with named columns: CSV, TSV or JSON lines.

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
    """A record of a table: its location, and its fields by column name."""

    location: str
    fields: dict[str, Any]
    columns: Sequence[str] = ()  # all columns of the table; empty for JSON lines

    def text(self, name: str) -> str:
        """Return a field that is a string and not blank; the numbers of a JSON file are not text."""
        text = string_field(self.fields, name, self.location)
        if not text.strip():
            raise InputError(f"{self.location}: the column '{name}' is empty here; fill it in or remove the record")
        return text

    def id(self, name: str | None) -> str:
        """Return the field with the id of the record; "" if `name` is None."""
        if name is None:
            return ""
        return id_field({name: require_field(self.fields, name, self.location)}, name, self.location)


def read(path: str | Path, *, skip_bad: bool = False, **options: Any) -> Examples[TextExample]:
    """Read all examples of a table. The options are those of `read_labeled`."""
    return collect_examples(read_labeled, Path(path), skip_bad, **options)


def collect_examples(
    reader: Callable[..., Iterator[ExampleT]], path: Path, skip_bad: bool, **options: Any
) -> Examples[ExampleT]:
    """Return all examples of a reader; a file without any is refused."""
    error_policy = ErrorPolicy(skip_bad)
    try:
        examples = Examples(reader(path, error_policy, **options))
    except InputError as error:
        raise InputError(one_line(error)) from None
    examples.skipped = error_policy.errors
    if not examples and error_policy.errors:
        count = len(error_policy.errors)
        records = "the only record is bad" if count == 1 else f"all {count} records are bad, the first"
        raise InputError(f"{path}: {records}: {error_policy.errors[0]}")
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
    """Read texts, or pairs of texts, with their labels.

    Args:
        path: the table.
        error_policy: handles bad records.
        text: column of the text.
        label: column of the label; None reads no labels.
        text_pair: column of the second text.
        id: column of the example's id.
        group: column of the group; examples of one group can be held out together.
        file_type: one of the FILE_TYPES, if the file name does not tell.
        header: whether the first line has the names of the columns; without it they are "1", "2", ….
        regression: the label is a number.
        label_separator: text between the labels of an example that has any number of them. A JSON list needs none.
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
    """Return a field as a label; JSON numbers and booleans become the text that a CSV file would have."""
    value = require_field(row.fields, name, row.location)
    if regression:
        return parse_number(value, row.location, name)
    if isinstance(value, list):
        return tuple(_class_name(item, name, row.location) for item in value)
    if label_separator is not None and isinstance(value, str):
        return tuple(item.strip() for item in value.split(label_separator) if item.strip())
    return _class_name(value, name, row.location)


def parse_number(value: Any, location: str, name: str) -> float:
    """Return a finite number."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{location}: the column '{name}' is {value!r}, not a number; correct it")
    return number


def _class_name(value: Any, name: str, location: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float) and not math.isnan(value):  # NaN is how pandas writes a missing value to JSON
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
    """Yield the records of a table that must have the `required` columns.

    With `allow_short_rows` a record can have fewer fields than the header, or more, of which the last are dropped.
    """
    file_type = file_type or _infer_file_type(path)
    if file_type not in FILE_TYPES:
        raise InputError(f"{path}: file_type '{file_type}' is unknown; {did_you_mean(file_type, FILE_TYPES)}")
    if file_type == "jsonl":
        yield from (Row(location, record) for location, record in json_records(path, error_policy))
        return
    columns: list[str] | None = None
    num_errors_before = len(error_policy.errors)
    for location, fields in (csv_records if file_type == "csv" else tsv_records)(path, error_policy):
        if columns is None:
            if header and len(error_policy.errors) > num_errors_before:  # the skipped line was the header
                raise InputError(error_policy.errors[num_errors_before])
            columns = _check_columns(fields, location, required, header)
            if header:
                continue
        with error_policy:
            if len(fields) != len(columns) and not allow_short_rows:
                raise field_count_error(location, fields, columns)
            yield Row(location, dict(zip(columns, fields, strict=False)), columns)


def field_count_error(location: str, fields: Sequence[str], columns: Sequence[str]) -> InputError:
    """Return the error for a record with too few or too many fields."""
    field_count = f"{len(fields)} field{'s' if len(fields) > 1 else ''}"
    return InputError(f"{location}: {field_count} where the table has {len(columns)} columns; repair the record")


def missing_column_error(location: str, name: str, columns: Iterable[str]) -> InputError:
    """Return the error for a missing column, with a hint if the file seems to be in another format."""
    column_names = list(columns)
    if column_names and column_names[0].startswith("{"):
        return InputError(f"{location}: no column '{name}', but JSON; give the format jsonl")
    separators = (";", "\t", "|", ",") if len(column_names) == 1 else ()
    separator = next((character for character in separators if character in column_names[0]), None)
    if separator is not None:
        separator_name = "tabs" if separator == "\t" else f"'{separator}'"
        remedy = {"\t": "give the format tsv", ",": "give the format csv"}.get(separator, "convert it")
        problem = f"it has {separator_name} where csv has commas and tsv tabs"
        return InputError(f"{location}: no column '{name}'; {problem}; {remedy}")
    return InputError(f"{location}: no column '{name}'; the columns are: {', '.join(column_names)}")


def _check_columns(fields: list[str], location: str, required: Iterable[str], header: bool) -> list[str]:
    columns = [name.strip() for name in fields] if header else [str(number + 1) for number in range(len(fields))]
    for name in required:
        if name not in columns:
            raise missing_column_error(location, name, columns)
        if columns.count(name) > 1:
            raise InputError(f"{location}: {columns.count(name)} columns have the name '{name}'; rename all but one")
    return columns


def _infer_file_type(path: Path) -> str:
    file_type = SUFFIXES.get(file_suffix(path))
    if file_type is None:
        raise InputError(f"{path}: unknown suffix; rename it to one of {', '.join(SUFFIXES)}, or give file_type")
    return file_type
