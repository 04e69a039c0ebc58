"""Inputs as they come, however many: read a window at a time, answered in batches of similar length, given in order.

What a file holds is never in memory as a whole: a window is read, answered and printed before the next one is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.data.sifting import skipped_lines
from qkv.errors import InputError, in_one_line

if TYPE_CHECKING:
    from qkv.data.tasks.lines import Bad

_WINDOWS = (64, 512)  # the first ones are small, so that something is seen, or refused, soon
_WINDOW = 4096
_KEPT = 100  # reasons of what was skipped
_TRUTHS = ("label", "tags", "answer", "answers")  # columns that say what is right; a file may be without


@dataclass(frozen=True)
class Input:
    """A line of text, or an example of a format, and where it came from."""

    text: str
    where: str
    example: Any = None
    in_file: bool = True  # or on the command line

    @property
    def told(self) -> dict[str, str]:
        """What JSON says of it: with its place, for lines may be skipped."""
        return {"input": self.text} | ({"where": self.where} if self.in_file else {})


Answer = Callable[[Sequence[Input], int], list[list[str]]]  # inputs and the first one's number to lines of each


def from_words(texts: Sequence[str]) -> Iterator[Input]:
    """Those of the command line."""
    from qkv.decode.frames import place_of

    return (Input(text, place_of(text), in_file=False) for text in texts)


def from_stdin(bad: Bad) -> Iterator[Input]:
    """A text a line."""
    from qkv.data.tasks.lines import decoded

    number = 0
    for number, line in enumerate(getattr(sys.stdin, "buffer", sys.stdin), 1):
        with bad:
            where = f"stdin:{number}"
            text = line if isinstance(line, str) else decoded(line, where)
            yield Input(text.removesuffix("\n").removesuffix("\r"), where)
    if not number:
        raise InputError("stdin: empty, no text in it; give one text a line")


def from_file(path: Path, bad: Bad) -> Iterator[Input]:
    """A text a line, plain or packed."""
    from qkv.data.tasks.lines import lines
    from qkv.data.tasks.pictures import ENDINGS

    if path.suffix.lower() in ENDINGS:
        raise InputError(f"{path}: is a picture; give its name as TEXT, or by --file a text file of such names")
    if path.is_dir():
        raise InputError(f"{path}: is a folder; say how its files are written, --format (see docs/tasks.md)")
    empty = True
    for where, line in lines(path, bad):
        empty = False
        with bad:
            if not line.strip():
                raise InputError(f"{where}: the text is empty; fill it in or remove the line")
            yield Input(line, where)
    if empty and not bad.reasons:
        raise InputError(f"{path}: empty, no text in it; give a file with one text a line")


def from_format(format: str, path: Path, columns: dict[str, Any], bad: Bad) -> Iterator[Input]:
    """The examples of a file in one of the formats of tasks; what is right in them is not asked for."""
    from qkv.data.tasks.formats import named, settings_of, stream
    from qkv.evaluate.report import without_truth
    from qkv.tasks.said import shown

    if named(format).in_folders(path):
        raise InputError(f"{path}: has folders of several parts; name one of them, such as {path / 'test'}")
    unasked: dict[str, str | None] = {name: None for name in _TRUTHS if name in settings_of(format)}
    if "scheme" in settings_of(format):
        unasked["scheme"] = "none"  # nor are tags that are not BIO
    empty = True
    for example in stream(format, path, bad, columns={**unasked, **columns}):
        empty = False
        known = without_truth(example)
        yield Input(shown(known), known.where, known)
    if empty and not bad.reasons:
        raise InputError(f"{path}: empty, no examples in it; give a file with at least one")


class Stream:
    """Answers inputs window by window."""

    def __init__(self, answer: Answer, bad: Bad) -> None:
        self._answer, self._bad = answer, bad
        self.skipped = 0
        self._reasons: list[str] = []

    def lines(self, inputs: Iterator[Input]) -> Iterator[tuple[int, list[str]]]:
        """Of each window how many inputs it took, and the lines to print."""
        first, number, good = 0, 0, False
        while True:
            size = _WINDOWS[number] if number < len(_WINDOWS) else _WINDOW
            window = list(islice(inputs, size))
            number += 1
            found = self._answered(window, first) if window else []
            self._note()
            good = good or bool(found)
            if not good and self.skipped:  # all alike: it is hardly the lines that are bad
                raise InputError(f"nothing is left but bad examples, the first: {self._reasons[0]}")
            yield len(window), [line for lines in found for line in lines]
            first += len(window)
            if len(window) < size:
                return

    def _answered(self, window: Sequence[Input], first: int) -> list[list[str]]:
        """Lines of each input; a bad one is refused, or looked for by halves and left out."""
        try:
            return self._answer(window, first)
        except InputError as error:
            if not self._bad.skip:
                raise
            if len(window) == 1:
                self._bad.reasons.append(in_one_line(error))
                return []
        half = len(window) // 2
        return self._answered(window[:half], first) + self._answered(window[half:], first + half)

    def _note(self) -> None:
        """Keeps how many reasons there were, and the first of them."""
        self.skipped += len(self._bad.reasons)
        self._reasons += self._bad.reasons[: _KEPT - len(self._reasons)]
        self._bad.reasons.clear()

    def told(self) -> list[str]:
        """What is to be said of what was skipped."""
        return skipped_lines(self._reasons, self.skipped)


@contextmanager
def progress(total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar where a person watches and the output goes elsewhere: lines that scroll by are progress enough."""
    if not sys.stderr.isatty() or sys.stdout.isatty():
        yield lambda done: None  # noqa: ARG005
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, advance=done)


def count_lines(path: Path | None) -> int | None:
    """How many lines a file has, where that is soon known: of a packed one it is not."""
    from qkv.data.tasks.lines import PACKED

    if path is None or path.suffix.lower() in PACKED or not path.is_file():
        return None
    count, last = 0, b"\n"
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")
