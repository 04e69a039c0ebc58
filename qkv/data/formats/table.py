"""Reader of tables with named columns: CSV, TSV, JSON lines or Parquet.

table.read("mine.csv", text="review", label="stars")
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qkv.data.examples import Examples, ExampleT, Label, TextExample
from qkv.data.formats.dialect import TAB
from qkv.data.formats.fields import require_field, string_field
from qkv.data.formats.io import ErrorPolicy, file_suffix, json_records, read_raw_lines
from qkv.data.formats.rows import Source, has_stored_records, iter_stored_records
from qkv.data.formats.text_table import Row, TextTable, missing_column_error
from qkv.errors import InputError, describe_value, did_you_mean, one_line, quote

SUFFIXES = {".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".txt": "tsv"}
SUFFIXES |= {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
FILE_TYPES = ("csv", "tsv", "jsonl", "parquet")
_ONE_HOT = {0: False, 1: True, "0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}
_DECIMAL_COMMA = re.compile(r"[+-]?\d+(\.\d{3})*,\d+")


def read(path: str | Path, *, skip_bad: bool = False, **options: Any) -> Examples[TextExample]:
    """Read all examples of a table. The options are those of `read_labeled`."""
    return collect_examples(read_labeled, Path(path), skip_bad, **options)


def collect_examples(
    reader: Callable[..., Iterator[ExampleT]], source: Source, skip_bad: bool, /, **options: Any
) -> Examples[ExampleT]:
    """Return all examples of a reader; a file without any is refused."""
    error_policy = ErrorPolicy(skip_bad)
    try:
        examples = Examples(reader(source, error_policy, **options))
    except InputError as error:
        raise InputError(one_line(error)) from None
    examples.skipped, examples.notes = error_policy.errors, error_policy.notes
    examples.detected = error_policy.detected
    if not examples and error_policy.errors:
        count = len(error_policy.errors)
        records = "the only record is bad" if count == 1 else f"all {count} records are bad, the first"
        raise InputError(f"{source}: {records}: {error_policy.errors[0]}")
    if not examples:
        raise InputError(f"{source}: empty, no examples in it; give a file with at least one")
    return examples


def read_labeled(
    source: Source,
    error_policy: ErrorPolicy,
    *,
    text: str = "text",
    label: str | None = "label",
    text_pair: str | None = None,
    id: str | None = None,
    group: str | None = None,
    labels: Sequence[str] | str | None = None,
    file_type: str | None = None,
    header: bool = True,
    delimiter: str | None = None,
    encoding: str | None = None,
    regression: bool = False,
    decimal_comma: bool = False,
    label_separator: str | None = None,
) -> Iterator[TextExample]:
    """Read texts, or pairs of texts, with their labels.

    Args:
        source: the table.
        error_policy: handles bad records.
        text: column of the text.
        label: column of the label; None reads no labels.
        text_pair: column of the second text.
        id: column of the example's id.
        group: column of the group; examples of one group can be held out together.
        labels: one-hot columns in place of `label`, a list or names separated by commas: each has 1 if the label of its
            name applies, else 0.
        file_type: one of the FILE_TYPES, if the file name does not tell.
        header: whether the first line has the names of the columns; without it they are "1", "2", ….
        delimiter: character between the fields; None: detected.
        encoding: encoding of the file; None: detected.
        regression: the label is a number.
        decimal_comma: numbers have a comma in place of the decimal point.
        label_separator: text between the labels of an example that has any number of them. A JSON list needs none.
    """
    label_columns = [] if labels is None or label is None else split_names(labels)
    gold_columns: list[str | None] = [*label_columns] or [label]
    required = [name for name in (text, text_pair, *gold_columns, id, group) if name is not None]
    options: dict[str, Any] = {"file_type": file_type, "header": header, "delimiter": delimiter, "encoding": encoding}
    named = {"--text": text, "--text-pair": text_pair, "--label": None if label_columns else label}
    options["column_options"] = {name: option for option, name in named.items() if name is not None}

    def parse_gold(row: Row) -> Label:
        if label_columns:
            return parse_one_hot(row, label_columns)
        return None if label is None else parse_label(row, label, regression, label_separator, decimal_comma)

    for row in read_rows(source, error_policy, required=required, **options):
        with error_policy:
            yield TextExample(
                text=row.text(text),
                location=row.location,
                text_pair=None if text_pair is None else row.text(text_pair),
                label=parse_gold(row),
                id=row.id(id),
                group=row.id(group),
            )


def split_names(names: Sequence[str] | str) -> list[str]:
    """Return several columns, given as a list or with commas between them."""
    items = names.split(",") if isinstance(names, str) else names
    columns = [str(name).strip() for name in items]
    if not columns or not all(columns) or len(set(columns)) < len(columns):
        raise InputError(f"columns {quote(names)}: give different names, as a list or with commas between them")
    return columns


def parse_one_hot(row: Row, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the columns that are 1; all others must be 0."""
    present = []
    for name in columns:
        value = require_field(row.fields, name, row.location)
        key = value.strip().lower() if isinstance(value, str) else value
        if key not in _ONE_HOT:
            raise InputError(
                f"{row.location}: the label column '{name}' is {describe_value(value)}, neither 0 nor 1; correct it"
            )
        if _ONE_HOT[key]:
            present.append(name)
    return tuple(present)


def parse_label(
    row: Row,
    name: str,
    regression: bool = False,
    label_separator: str | None = None,
    decimal_comma: bool = False,
) -> Label:
    """Return a field as a label; JSON numbers and booleans become the text that a CSV file would have."""
    value = require_field(row.fields, name, row.location)
    if regression:
        return parse_number(value, row.location, name, decimal_comma)
    if isinstance(value, list):
        return tuple(_class_name(item, name, row.location) for item in value)
    if label_separator is not None and isinstance(value, str):
        return tuple(item.strip() for item in value.split(label_separator) if item.strip())
    return _class_name(value, name, row.location)


def parse_number(value: Any, location: str, name: str, decimal_comma: bool = False) -> float:
    """Return a finite number; with `decimal_comma`, "1.234,5" is 1234.5."""
    text = value
    if isinstance(value, str) and decimal_comma:
        text = value.replace(".", "").replace(",", ".")
    try:
        is_number = not isinstance(value, bool) and not (isinstance(text, str) and "_" in text)  # float("1_0") is 10
        number = float(text) if is_number else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        hint = "correct it"
        if isinstance(value, str) and _DECIMAL_COMMA.fullmatch(value.strip()):
            hint = "set the option decimal_comma: true if its numbers have decimal commas"
        raise InputError(f"{location}: the column '{name}' is {describe_value(value)}, not a number; {hint}")
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
    source: Source,
    error_policy: ErrorPolicy,
    *,
    required: Iterable[str] = (),
    optional: Iterable[str] = (),
    file_type: str | None = None,
    header: bool = True,
    delimiter: str | None = None,
    encoding: str | None = None,
    allow_short_rows: bool = False,
    column_options: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """Yield the records of a table.

    A record may have fewer fields than the header if those of the columns in use are there, and more if they are empty.

    Args:
        source: the file, or records in memory.
        error_policy: handles bad records.
        required: the columns in use, which the table must have.
        optional: columns that are in use if the table has them.
        file_type: one of the FILE_TYPES, if the file name does not tell.
        header: whether the first line has the names of the columns.
        delimiter: the character between the fields; None: detected.
        encoding: the encoding of the file; None: detected.
        allow_short_rows: yield records that lack fields as they are.
        column_options: the option of the command that names a column, by column, for messages.
    """
    if has_stored_records(source) or file_type == "parquet":
        _refuse_text_options(source, delimiter=delimiter is not None, encoding=encoding is not None, header=not header)
        yield from _stored_rows(source, error_policy, required, column_options or {})
        return
    assert isinstance(source, Path)
    file_type = file_type or _infer_file_type(source)
    if file_type not in FILE_TYPES:
        raise InputError(f"{source}: file_type {quote(file_type)} is unknown; {did_you_mean(file_type, FILE_TYPES)}")
    if file_type == "jsonl":
        _refuse_text_options(source, delimiter=delimiter is not None, header=not header)
        records = json_records(source, error_policy, encoding=encoding)
        yield from (Row(location, record) for location, record in records)
        return
    lines = read_raw_lines(source, error_policy, encoding=encoding, detect=True)
    names = (tuple(required), tuple(optional))
    table = TextTable(source, error_policy, *names, header, allow_short_rows, column_options or {})
    yield from table.iter_rows(lines, TAB if file_type == "tsv" else ",", delimiter)


def _refuse_text_options(source: Source, **options: bool) -> None:
    """Refuse options of delimited text, if they are set, for records whose fields have names."""
    name = next((name for name, is_set in options.items() if is_set), None)
    if name is not None:
        raise InputError(f"{source}: its fields have names, and the option {name} does not apply; leave it out")


def _stored_rows(
    source: Source, error_policy: ErrorPolicy, required: Iterable[str], column_options: Mapping[str, str]
) -> Iterator[Row]:
    for number, (location, record) in enumerate(iter_stored_records(source)):
        if number == 0:
            for name in required:
                if name not in record:
                    raise missing_column_error(str(source), name, record, option=column_options.get(name))
        with error_policy:
            error_policy.record_row(location, record)
            yield Row(location, record, tuple(record))


def _infer_file_type(path: Path) -> str:
    file_type = SUFFIXES.get(file_suffix(path))
    if file_type is None:
        raise InputError(f"{path}: unknown suffix; rename it to one of {', '.join(SUFFIXES)}, or give file_type")
    return file_type
