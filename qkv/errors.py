"""The one exception that is meant for people: a bad file, key, checkpoint or input, said in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """What is wrong, where (file, line, key) and what to do; the command line prints it and exits with 2."""


def one_line(error: InputError) -> str:
    """What is wrong; names and labels that it quotes out of a file may have line breaks of their own."""
    return " ".join(str(error).splitlines())


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """A hint for a mistyped name: the closest known one, or the list of them."""
    names = sorted(choices)
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean '{matches[0]}'?" if matches else f"known: {', '.join(names)}"
