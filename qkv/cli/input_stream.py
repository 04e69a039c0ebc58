"""Streams of inputs: read one window, predict it in batches of similar length, print it in input order, read the next.

A file is never in memory as a whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.data.filtering import format_skipped
from qkv.errors import InputError, one_line

if TYPE_CHECKING:
    from qkv.data.formats.io import ErrorPolicy

_FIRST_WINDOW_SIZES = (64, 512)  # inputs; small, so that the first output or error comes soon
_WINDOW_SIZE = 4096
_MAX_REASONS = 100  # errors of skipped inputs that are kept
_GOLD_COLUMNS = ("label", "tags", "answer", "answers")  # columns of labels, which a file to predict for may lack


@dataclass(frozen=True)
class Input:
    """One input."""

    text: str  # the input as one line
    location: str  # such as file:line
    example: Any = None  # the input as an example, if it was read with --format
    in_file: bool = True  # False: from the command line

    @property
    def fields(self) -> dict[str, str]:
        """The input's part of the JSON output; with its location, since lines may be skipped."""
        return {"input": self.text} | ({"location": self.location} if self.in_file else {})


PredictLines = Callable[[Sequence[Input], int], list[list[str]]]  # (inputs, index of the first) -> output lines of each


def from_args(texts: Sequence[str]) -> Iterator[Input]:
    """Yield the texts of the command line."""
    from qkv.checkpoints.inputs import describe_input

    return (Input(text, describe_input(text), in_file=False) for text in texts)


def from_stdin(error_policy: ErrorPolicy) -> Iterator[Input]:
    """Yield each line of stdin."""
    from qkv.data.formats.io import decode_line

    line_number = 0
    for line_number, line in enumerate(getattr(sys.stdin, "buffer", sys.stdin), 1):
        with error_policy:
            location = f"stdin:{line_number}"
            text = line if isinstance(line, str) else decode_line(line, location)
            yield Input(text.removesuffix("\n").removesuffix("\r"), location)
    if not line_number:
        raise InputError("stdin: empty, no text in it; give one text per line")


def from_file(path: Path, error_policy: ErrorPolicy) -> Iterator[Input]:
    """Yield each line of a text file, which may be compressed."""
    from qkv.data.formats.images import SUFFIXES
    from qkv.data.formats.io import read_lines

    if path.suffix.lower() in SUFFIXES:
        raise InputError(f"{path}: is an image; give its name as TEXT, or a text file of image names as --file")
    if path.is_dir():
        raise InputError(f"{path}: is a folder; give its --format (see docs/tasks.md)")
    empty = True
    for location, line in read_lines(path, error_policy):
        empty = False
        with error_policy:
            if not line.strip():
                raise InputError(f"{location}: the text is empty; fill it in or remove the line")
            yield Input(line, location)
    if empty and not error_policy.errors:
        raise InputError(f"{path}: empty, no text in it; give a file with one text per line")


def from_format(format: str, path: Path, reader_options: dict[str, Any], error_policy: ErrorPolicy) -> Iterator[Input]:
    """Yield the examples of a file in a registered format, without their labels."""
    from qkv.data import formats

    if formats.get_format(format).splits_in_folders(path):
        raise InputError(f"{path}: has folders of several splits; name one of them, such as {path / 'test'}")
    known_options = formats.reader_options(format)
    hidden_columns: dict[str, str | None] = {name: None for name in _GOLD_COLUMNS if name in known_options}
    if "scheme" in known_options:
        hidden_columns["scheme"] = "none"  # tags are labels, so they are not checked
    empty = True
    columns = {**hidden_columns, **reader_options}
    for example in formats.iter_examples(format, path, error_policy, columns=columns):
        empty = False
        unlabeled = example.without_label()
        yield Input(unlabeled.to_line(), unlabeled.location, unlabeled)
    if empty and not error_policy.errors:
        raise InputError(f"{path}: empty, no examples in it; give a file with at least one")


def iter_inputs(
    texts: list[str],
    file: Path | None,
    error_policy: ErrorPolicy,
    format: str | None = None,
    reader_options: dict[str, Any] | None = None,
) -> Iterator[Input] | None:
    """Return an iterator over the inputs, or None to read them at a prompt."""
    if file is not None and texts:
        raise InputError("give TEXT or --file, not both")
    if file is None and (format is not None or reader_options):
        raise InputError("--format, --text, --text-pair and --reader-option go with --file")
    if reader_options and format is None:
        raise InputError("--text, --text-pair and --reader-option need --format, the format of --file")
    if file is not None:
        if format is None:
            return from_file(file, error_policy)
        return from_format(format, file, reader_options or {}, error_policy)
    if texts == ["-"] or (not texts and not sys.stdin.isatty()):
        return from_stdin(error_policy)
    return from_args(texts) if texts else None


def parse_reader_options(options: list[str] | None, **named: str | None) -> dict[str, Any]:
    """Return the values of --reader-option KEY=VALUE, and of reader options that have a command-line option."""
    parsed: dict[str, Any] = {key: value for key, value in named.items() if value is not None}
    for option in options or []:
        key, equals, value = option.partition("=")
        if not equals or not key:
            raise InputError(f"--reader-option: '{option}' is not KEY=VALUE, such as label=stars")
        parsed[key] = {"true": True, "false": False, "none": None}.get(value, value)
    return parsed


class StreamingPredictor:
    """Predictions of a stream, window by window."""

    def __init__(self, predict: PredictLines, error_policy: ErrorPolicy) -> None:
        self._predict, self._error_policy = predict, error_policy
        self.skipped = 0
        self._reasons: list[str] = []

    def iter_lines(self, inputs: Iterator[Input]) -> Iterator[tuple[int, list[str]]]:
        """Yield the number of inputs and the output lines of each window."""
        first_index, window_index, any_succeeded = 0, 0, False
        while True:
            size = _FIRST_WINDOW_SIZES[window_index] if window_index < len(_FIRST_WINDOW_SIZES) else _WINDOW_SIZE
            window = list(islice(inputs, size))
            window_index += 1
            outputs = self._predict_window(window, first_index) if window else []
            self._collect_reasons()
            any_succeeded = any_succeeded or bool(outputs)
            if not any_succeeded and self.skipped:  # all failed: the inputs are hardly the reason
                raise InputError(f"all examples are bad, the first: {self._reasons[0]}")
            yield len(window), [line for lines in outputs for line in lines]
            first_index += len(window)
            if len(window) < size:
                return

    def _predict_window(self, window: Sequence[Input], first_index: int) -> list[list[str]]:
        """Return the output lines of each input; a bad input is refused, or found by bisection and skipped."""
        try:
            return self._predict(window, first_index)
        except InputError as error:
            if not self._error_policy.skip:
                raise
            if len(window) == 1:
                self._error_policy.errors.append(one_line(error))
                return []
        half = len(window) // 2
        return self._predict_window(window[:half], first_index) + self._predict_window(
            window[half:], first_index + half
        )

    def _collect_reasons(self) -> None:
        """Count the errors and keep the first of them."""
        self.skipped += len(self._error_policy.errors)
        self._reasons += self._error_policy.errors[: _MAX_REASONS - len(self._reasons)]
        self._error_policy.errors.clear()

    def warnings(self) -> list[str]:
        """Return a summary of the skipped inputs."""
        return format_skipped(self._reasons, self.skipped)


@contextmanager
def progress_bar(total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr if it is a terminal and stdout is not."""
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
    """Return the number of lines of a file, None for a compressed one."""
    from qkv.data.formats.io import COMPRESSED

    if path is None or path.suffix.lower() in COMPRESSED or not path.is_file():
        return None
    count, last = 0, b"\n"
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")
