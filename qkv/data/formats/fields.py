"""Typed access to the fields of a JSON object, with errors that name the record."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from qkv.errors import InputError, describe_value, did_you_mean, quote
from qkv.json_reader import parse_json

_MAX_FIELDS_SHOWN = 20
_MAX_DIGITS = 10  # of a count; Python refuses to parse numbers with thousands of digits


def object_field(record: Mapping[str, Any], name: str, location: str) -> dict[str, Any]:
    """Return a field that is an object."""
    value = require_field(record, name, location)
    if not isinstance(value, dict):
        raise InputError(f"{location}: field '{name}' is not an object; write {{…}}")
    return value


def objects_field(record: Mapping[str, Any], name: str, location: str) -> list[dict[str, Any]]:
    """Return a field that is a list of objects."""
    value = require_field(record, name, location)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InputError(f"{location}: field '{name}' is not a list of objects; write [{{…}}, …]")
    return value


def strings_field(record: Mapping[str, Any], name: str, location: str) -> tuple[str, ...]:
    """Return a field that is a list of strings."""
    value = require_field(record, name, location)
    if not isinstance(value, list):
        raise InputError(f"{location}: field '{name}' is not a list of strings; write [\"…\", …]")
    return tuple(
        string_field({f"{name}[{number}]": text}, f"{name}[{number}]", location) for number, text in enumerate(value)
    )


def int_field(record: Mapping[str, Any], name: str, location: str) -> int:
    """Return a field that is an integer."""
    value = require_field(record, name, location)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{location}: field '{name}' is {describe_value(value)}, not an integer; correct it")
    return value


def parse_count(text: str) -> int | str:
    """Return the non-negative integer that a text spells, or the text itself if it spells none."""
    return int(text) if text.strip().isdecimal() and len(text) < _MAX_DIGITS else text


def id_field(record: Mapping[str, Any], name: str, location: str) -> str:
    """Return an id, a string or an integer, as text; "" if the field is missing."""
    value = record.get(name, "")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InputError(
            f"{location}: field '{name}' is {describe_value(value)}, neither a string nor an integer; correct it"
        )
    return str(value)


def require_field(record: Mapping[str, Any], name: str, location: str) -> Any:
    """Return a field of any type; a missing one is refused."""
    if name not in record:
        raise InputError(f"{location}: no field '{name}'; {_field_hint(name, record)}")
    return record[name]


def _field_hint(name: str, record: Mapping[str, object]) -> str:
    """Return the nearest field, or the first fields, of a record; their names may be long and many."""
    names = [quote(str(field))[1:-1] for field in islice(record, _MAX_FIELDS_SHOWN)]
    return did_you_mean(name, names) if names else "the object is empty"


def parse_json_object(line: str, location: str, expected: str) -> dict[str, Any]:
    """Parse one line of a JSON lines file; `expected` shows a correct line in messages."""
    record = parse_json(line, f"{location}: the record", allow_nan=True)
    if not isinstance(record, dict):
        raise InputError(f"{location}: not a JSON object; write {expected}")
    return record


def string_field(record: Mapping[str, object], name: str, location: str) -> str:
    """Return a field that is a string and valid Unicode."""
    if name not in record:
        raise InputError(f"{location}: no field '{name}'; {_field_hint(name, record)}")
    value = record[name]
    if not isinstance(value, str):
        raise InputError(f"{location}: field '{name}' is not a string; put it in quotes")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # "\ud800" is valid JSON, but half of a surrogate pair
        raise InputError(f"{location}: field '{name}' contains a lone surrogate escape; remove or repair it") from None
    return value
