"""The exception for users: a bad file, key, checkpoint or input, described in one line."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

_MAX_NAME, _MAX_KNOWN = 60, 600  # characters of a name, and of a list of names
_MAX_MESSAGE = 1500  # characters of a message
_MAX_DIGITS = 60  # of a number that a message quotes
_Number = TypeVar("_Number", int, float)

_ESCAPED = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\0": "\\0"}


class InputError(ValueError):
    """An error that the user can correct: what is wrong, where (file, line, key) and what to do.

    The command line prints it and exits with code 2. The message is one line, and a very long one loses its middle, so
    that content quoted from a file cannot flood the terminal.
    """

    def __init__(self, message: str = "") -> None:
        line = " ".join(message.splitlines()) if "\n" in message or "\r" in message else message
        if len(line) > _MAX_MESSAGE:
            line = f"{line[: 2 * _MAX_MESSAGE // 3]} … {line[-_MAX_MESSAGE // 3 :]}"
        super().__init__(line)


class NoTextError(InputError):
    """There is no text to encode or to train on; a caller that knows the files raises an error that names them."""


def one_line(error: InputError) -> str:
    """Return the message as one line; names quoted from a file may contain line breaks."""
    return " ".join(str(error).splitlines())


def quote(value: object, max_chars: int = 60) -> str:
    """Return foreign content for an error message: on one line and cut to `max_chars` characters; a text in quotes."""
    text = value if isinstance(value, str) else repr(value)
    cut = text[:max_chars] if len(text) <= max_chars else text[: max_chars - 1] + "…"
    printable = "".join(char if char.isprintable() else _ESCAPED.get(char, "�") for char in cut)
    return f"'{printable}'" if isinstance(value, str) else printable


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return a hint for a mistyped name: the closest known name, or the list of all."""
    names = sorted(choices)
    # a file may have thousands of names, or very long ones
    matches = difflib.get_close_matches(name[:_MAX_NAME], [one[:_MAX_NAME] for one in names[:1000]], n=1, cutoff=0.5)
    if matches:
        return f"did you mean {quote(matches[0])}?"
    known = quote(", ".join(names[:1000]), _MAX_KNOWN)[1:-1]
    return f"known: {known}"


# ---- checks of arguments --------------------------------------------------------------------------------------------


def describe_value(value: object) -> str:
    """Return a value for an error message: short texts and numbers as Python writes them, else the name of the type."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**_MAX_DIGITS):
        return str(value)
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, bytes):
        return f"the bytes {quote(value[:80])}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def check_type(value: object, types: Any, name: str, expected: str) -> None:
    """Refuse an argument of another type.

    Args:
        value: the argument.
        types: the types it may have, as for `isinstance`; True and False are no numbers unless `bool` is among them.
        name: the name of the parameter.
        expected: what a caller should give, such as "a list of texts".
    """
    bool_as_number = isinstance(value, bool) and types is not bool and types is not object
    if bool_as_number or not isinstance(value, types):
        raise InputError(f"{name}: expected {expected}, not {describe_value(value)}")


def check_flag(value: object, name: str) -> None:
    """Refuse an argument that is neither True nor False."""
    check_type(value, bool, name, "True or False")


def check_number(value: _Number, name: str, low: float, high: float | None = None, *, integer: bool = True) -> _Number:
    """Return a number, or refuse one that is out of range, not finite, or not whole where it must be."""
    bounds = f"at least {low}" if high is None else f"from {low} to {high}"
    expected = f"a {'whole ' if integer else ''}number, {bounds}"
    check_type(value, int if integer else (int, float), name, expected)
    # a NaN compares false with everything
    if not (value >= low and (value <= high if high is not None else value < float("inf"))):
        raise InputError(f"{name}: expected {expected}, not {describe_value(value)}")
    return value


def check_choice(value: object, choices: Collection[str], name: str) -> None:
    """Refuse a value that is not one of some names."""
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"{name} is {' or '.join(choices)}, not {describe_value(value)}")


def check_path(value: object, name: str, expected: str = "a path") -> Path:
    """Return a path, which need not exist, or refuse a value that can be none."""
    if not isinstance(value, str | os.PathLike):
        raise InputError(f"{name}: expected {expected}, not {describe_value(value)}")
    text = os.fspath(value)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise InputError(f"{name}: expected {expected}, not {describe_value(text)}")
    try:
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError):
        pass  # whether it must exist depends on the caller
    except (OSError, ValueError) as error:  # a name that is too long, a folder that may not be entered, a surrogate
        reason = getattr(error, "strerror", None) or "not a valid name"
        raise InputError(f"{name}: {describe_value(text)} cannot be used as a path ({reason}); check it") from None
    return Path(text)


def check_names(value: object, name: str, expected: str = "a list of texts") -> list[str]:
    """Return the texts of a list, tuple or array; a single text is a list of one."""
    if isinstance(value, str):
        return [value]
    try:
        items = list(value) if isinstance(value, Iterable) and not isinstance(value, bytes | dict) else [None]
    except TypeError:  # an array without dimensions
        items = [None]
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) != len(items):
        raise InputError(f"{name}: expected {expected}, not {describe_value(value)}")
    return texts
