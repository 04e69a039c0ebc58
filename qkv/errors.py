"""The exception for users: a bad file, key, checkpoint or input, described in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """An error that the user can correct: what is wrong, where (file, line, key) and what to do.

    The command line prints it and exits with code 2.
    """


class NoTextError(InputError):
    """There is no text to encode or to train on; a caller that knows the files raises an error that names them."""


def one_line(error: InputError) -> str:
    """Return the message as one line; names quoted from a file may contain line breaks."""
    return " ".join(str(error).splitlines())


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return a hint for a mistyped name: the closest known name, or the list of all."""
    names = sorted(choices)
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean '{matches[0]}'?" if matches else f"known: {', '.join(names)}"
