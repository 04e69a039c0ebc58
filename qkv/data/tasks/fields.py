"""Fields of a JSON object that are there and of the kind that they should be; strings are `readers.text_field`'s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qkv.data.readers import text_field
from qkv.errors import InputError, nearest

_DIGITS = 10  # of what still counts something; Python refuses to read a number of thousands of them


def object_field(record: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """A field that is an object."""
    value = present(record, name, where)
    if not isinstance(value, dict):
        raise InputError(f"{where}: field '{name}' is not an object; write {{…}}")
    return value


def objects_field(record: Mapping[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    """A field that is a list of objects."""
    value = present(record, name, where)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InputError(f"{where}: field '{name}' is not a list of objects; write [{{…}}, …]")
    return value


def texts_field(record: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    """A field that is a list of strings."""
    value = present(record, name, where)
    if not isinstance(value, list):
        raise InputError(f"{where}: field '{name}' is not a list of strings; write [\"…\", …]")
    return tuple(
        text_field({f"{name}[{number}]": text}, f"{name}[{number}]", where) for number, text in enumerate(value)
    )


def whole_field(record: Mapping[str, Any], name: str, where: str) -> int:
    """A field that is a whole number."""
    value = present(record, name, where)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{where}: field '{name}' is {value!r}, not a whole number; correct it")
    return value


def counted(text: str) -> int | str:
    """A number out of a text that spells one from 0 on, else the text."""
    return int(text) if text.strip().isdecimal() and len(text) < _DIGITS else text


def named(record: Mapping[str, Any], name: str, where: str) -> str:
    """An id: a string or a number, as text; "" where there is none."""
    value = record.get(name, "")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InputError(f"{where}: field '{name}' is {value!r}, neither a string nor a whole number; correct it")
    return str(value)


def present(record: Mapping[str, Any], name: str, where: str) -> Any:
    """A field that is there, whatever it holds."""
    if name not in record:
        raise InputError(f"{where}: no field '{name}'; {nearest(name, record) if record else 'the object is empty'}")
    return record[name]
