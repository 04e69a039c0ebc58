"""Parse JSON that somebody else wrote: limits on nesting and on digits, and one line for every failure.

A key that occurs twice has its last value, as in all other readers of these files.
"""

from __future__ import annotations

import json
import math
import re
from itertools import chain
from typing import Any, NoReturn

from qkv.errors import InputError, quote
from qkv.limits import limit, raise_hint

# a longer document is a vocabulary or a dataset, and the checks would take a third of the time: its numbers are checked
# by its reader, and its depth by Python's limit on recursion
_CHECKED_CHARS = 1 << 17
# a number that may have too many digits or be too large; only a text with one needs a Python call per number
_LARGE_NUMBER = re.compile(r"[0-9](?:[0-9]{99}|[eE]\+?[0-9]{3})")
_SHALLOW = 16  # a text with so few brackets needs no look at the limit
_CONTAINERS = (dict, list)
# half of a surrogate pair; a backslash in front may escape this one, so that a match is only a suspicion
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F]"
_HALF_PAIR = re.compile(rf"{_HIGH}(?!{_LOW})|(?<!{_HIGH}){_LOW}")


def parse_json(text: str | bytes, where: str, *, allow_nan: bool = False) -> Any:
    """Return the value of a JSON text.

    Args:
        text: the JSON text; bytes are UTF-8.
        where: what the error message starts with, such as the path of the file.
        allow_nan: accept the constants NaN, Infinity and -Infinity, which our own logs contain.
    """
    if isinstance(text, bytes):
        text = decode_utf8(text, where)
    is_checked = len(text) <= _CHECKED_CHARS
    decoder = (_CHECKED if is_checked and _LARGE_NUMBER.search(text) else _UNCHECKED)[allow_nan]
    try:
        value = decoder.decode(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{_position(where, error.doc, error.pos)}: not JSON: {_reason(error)}") from None
    except _NumberError as error:
        raise InputError(f"{where}: {error}") from None
    except ValueError:  # Python converts no more than 4,300 digits
        raise InputError(f"{where}: a number has too many digits; {raise_hint('digits')}") from None
    except RecursionError:
        raise InputError(f"{where}: {_too_deep()}") from None
    if is_checked and text.count("[") + text.count("{") > _SHALLOW:
        _check_nesting(value, where)
    if ("\\ud" in text or "\\uD" in text) and _HALF_PAIR.search(text):
        _check_unicode(value, where)
    return value


def decode_utf8(content: bytes, where: str) -> str:
    """Return the text of UTF-8 bytes, without a byte order mark."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = f"byte 0x{content[error.start]:02X}"
        raise InputError(f"{where}, line {line:,}: {byte} is not UTF-8; save the file as UTF-8") from None


class _NumberError(Exception):
    """A number that JSON cannot have or that has too many digits."""


def _parse_int(text: str) -> int:
    if len(text) > limit("digits"):
        raise _NumberError(f"a number has {len(text):,} digits, {quote(text, 20)}; {raise_hint('digits')}")
    return int(text)


def _parse_float(text: str) -> float:
    if len(text) > limit("digits"):
        raise _NumberError(f"a number has {len(text):,} digits, {quote(text, 20)}; {raise_hint('digits')}")
    value = float(text)
    if not math.isfinite(value):
        raise _NumberError(f"the number {quote(text, 20)} is too large; give a number below 1e308")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise _NumberError(f"{name} is not a JSON number; replace it by a number or by null")


# by `allow_nan`
_CHECKED = (
    json.JSONDecoder(parse_int=_parse_int, parse_float=_parse_float, parse_constant=_refuse_constant),
    json.JSONDecoder(parse_int=_parse_int, parse_float=_parse_float),
)
_UNCHECKED = (json.JSONDecoder(parse_constant=_refuse_constant), json.JSONDecoder())


def _too_deep() -> str:
    return f"lists and objects are nested too deeply; {raise_hint('nesting')}"


def _check_nesting(value: Any, where: str) -> None:
    """Raise an error if lists and objects are nested more deeply than the limit; every level is one pass."""
    level = [value] if type(value) in _CONTAINERS else []
    for _ in range(limit("nesting")):
        children = chain.from_iterable(node.values() if type(node) is dict else node for node in level)
        level = [child for child in children if type(child) in _CONTAINERS]
        if not level:
            return
    raise InputError(f"{where}: {_too_deep()}")


def _check_unicode(value: Any, where: str) -> None:
    """Raise an error if a text cannot be written as UTF-8."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half_pair = f"\\u{ord(text[error.start]):04x}"
        raise InputError(f"{where}: {half_pair} is half of a surrogate pair, no character; repair the text") from None


def _position(where: str, text: str, offset: int) -> str:
    """Return the location with the column and, for a text of several lines, the line."""
    line_start = text.rfind("\n", 0, offset) + 1
    line = f", line {text.count(chr(10), 0, offset) + 1:,}" if "\n" in text.rstrip() else ""
    return f"{where}{line}, column {offset - line_start + 1:,}"


def _reason(error: json.JSONDecodeError) -> str:
    if not error.doc.strip():
        return "it is empty; copy it again"
    message = error.msg[:1].lower() + error.msg[1:]
    if error.pos >= len(error.doc.rstrip()):
        return f"{message}, but it ends here; copy it again"
    return f"{message}, at {quote(error.doc[error.pos : error.pos + 100], 20)}; repair it or copy it again"
