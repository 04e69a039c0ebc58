"""Records of predictions, as `qkv predict --json` and `qkv predict -o` write them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qkv.data.formats.io import ErrorPolicy, csv_records, file_suffix, json_records, read_lines
from qkv.errors import InputError, did_you_mean

Record = dict[str, Any]
RECORD_SUFFIXES = (".jsonl", ".ndjson", ".parquet")
TABLE_SUFFIXES = (".csv", ".tsv")
_PREDICTIONS = ("prediction", "label", "labels", "value", "answer", "text")  # fields of a prediction, the first counts
_TAGS, _WORDS = ("prediction", "tags"), "tokens"


def has_records(path: Path) -> bool:
    """Return whether a file has records with named fields: JSON lines, Parquet, or a table written by `qkv predict`."""
    suffix = file_suffix(path)
    return suffix in RECORD_SUFFIXES or (suffix in TABLE_SUFFIXES and _PREDICTIONS[0] in _header(path))


def iter_records(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the location and the fields of each record."""
    if file_suffix(path) in RECORD_SUFFIXES:
        yield from json_records(path, ErrorPolicy(), '{"prediction": …}')
        return
    columns: list[str] | None = None
    for location, fields in _table_rows(path):
        if columns is None:
            columns = [name.strip() for name in fields]
        elif len(fields) != len(columns):
            raise InputError(f"{location}: {len(fields)} fields where the table has {len(columns)}; repair the record")
        else:
            yield location, dict(zip(columns, fields, strict=True))


def _table_rows(path: Path) -> Iterator[tuple[str, list[str]]]:
    if file_suffix(path) == ".csv":
        return csv_records(path, ErrorPolicy())
    return ((location, line.split("\t")) for location, line in read_lines(path, ErrorPolicy()))


def _header(path: Path) -> list[str]:
    return [name.strip() for name in next(_table_rows(path), ("", []))[1]]


def prediction_cell(record: Record, column: str | None, location: str, separator: str) -> str:
    """Return a record's prediction as a line of text would have it; several labels have `separator` between them."""
    name = column or next((known for known in _PREDICTIONS if known in record), None)
    if name is None or name not in record:
        hint = did_you_mean(column, record) if column else f"the fields are: {', '.join(record)[:60]}"
        raise InputError(f"{location}: no field '{column or _PREDICTIONS[0]}'; {hint}")
    value = record[name]
    if isinstance(value, list | dict):  # sets of labels, possibly with probabilities
        return separator.join(map(str, value))
    return "" if value is None else str(value)


def prediction_tags(
    record: Record, column: str | None, location: str
) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Return the tags of a record's words, and the words if the record has them."""
    names = (column,) if column else _TAGS
    value = next((record[name] for name in names if name in record), None)
    words_with_tags = record.get("words")  # of --json: a list of {"text": …, "tag": …}
    if value is None and isinstance(words_with_tags, list) and all(isinstance(word, dict) for word in words_with_tags):
        value = [str(word.get("tag")) for word in words_with_tags]
        record = {_WORDS: [str(word.get("text")) for word in words_with_tags]}
    tags, words = _as_list(value), _as_list(record.get(_WORDS))
    if not tags:
        raise InputError(f"{location}: no tags in the field '{' or '.join(names)}'; write them as a list")
    return tuple(tags), tuple(words) if len(words) == len(tags) else None


def _as_list(value: Any) -> list[str]:
    """Return a list of texts; in a table they have spaces between them."""
    if isinstance(value, str):
        return value.split()
    return [str(item) for item in value] if isinstance(value, list | tuple) else []


def predictions_by_id(path: Path) -> dict[str, Any]:
    """Return the answer of each question by its id."""
    answers: dict[str, Any] = {}
    for location, record in iter_records(path):
        if record.get("id") in (None, ""):
            remedy = "predict for the SQuAD file itself, so that each line has the id of its question"
            raise InputError(f"{location}: has no id; {remedy}")
        answers[str(record["id"])] = prediction_cell(record, None, location, " ")
    return answers
