"""Streams of inputs: read a window, predict it in batches of similar length, write it in input order, read the next.

A file is never in memory as a whole. Models that generate text read on while other inputs are being decoded.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.cli.stdin_lines import StdinLines
from qkv.data.filtering import format_skipped
from qkv.errors import InputError, one_line

if TYPE_CHECKING:
    from qkv.data.formats.io import ErrorPolicy
    from qkv.tasks.input_files import FileFormat
    from qkv.tasks.predictions import TaskPrediction

_FIRST_WINDOW_SIZES = (64, 512)  # inputs; small, so that the first output or error comes soon
_WINDOW_SIZE = 4096
_CHUNK_SIZE = 64  # inputs of a file that are read together, and predictions that are written together
_MAX_REASONS = 100  # errors of skipped inputs that are kept
_GOLD_COLUMNS = ("label", "tags", "answer", "answers")  # columns of labels, which a file to predict for may lack


@dataclass(frozen=True)
class Input:
    """One input."""

    text: str  # the input as one line
    location: str  # such as file:line
    example: Any = None  # the input as an example, if it was read with a format
    row: Mapping[str, Any] = field(default_factory=dict)  # the fields of its row in a table
    in_file: bool = True  # False: from the command line

    @property
    def fields(self) -> dict[str, str]:
        """The input's part of the JSON output; with its id or location, since lines may be skipped."""
        return self._id | {"input": self.text} | ({"location": self.location} if self.in_file else {})

    @property
    def columns(self) -> dict[str, Any]:
        """The input's columns in a file of predictions: those of its row, or its text."""
        return dict(self.row) or self._id | {"input": self.text}

    @property
    def _id(self) -> dict[str, str]:
        example_id = getattr(self.example, "id", "")
        return {"id": example_id} if example_id else {}


TakeInputs = Callable[[int], list[Input]]  # (maximum number) -> the next inputs; [] at the end
Prediction = tuple[Input, "TaskPrediction"]


def from_iterator(inputs: Iterator[Input]) -> TakeInputs:
    """Return a function that takes the next inputs of an iterator."""
    return lambda size: list(islice(inputs, size))


def from_args(texts: Sequence[str]) -> Iterator[Input]:
    """Yield the texts of the command line."""
    from qkv.checkpoints.inputs import describe_input

    return (Input(text, describe_input(text), in_file=False) for text in texts)


def from_stdin(error_policy: ErrorPolicy) -> TakeInputs:
    """Take the lines of stdin that have arrived, so that a slow pipe is answered line by line."""
    from qkv.data.formats.io import decode_line

    lines = StdinLines()

    def take(size: int) -> list[Input]:
        inputs: list[Input] = []
        while not inputs and (arrived := lines.take(size)):
            for location, raw in arrived:
                with error_policy:
                    inputs.append(Input(decode_line(raw, location).removesuffix("\r"), location))
        if not inputs and not lines.count:
            raise InputError("stdin: empty, no text in it; give one text per line")
        return inputs

    return take


def from_lines(path: Path, error_policy: ErrorPolicy) -> Iterator[Input]:
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
                remedy = "fill it in, remove the line, or give the --format of the file"
                raise InputError(f"{location}: the text is empty; {remedy}")
            yield Input(line, location)
    if empty and not error_policy.errors:
        raise InputError(f"{path}: empty, no text in it; give a file with one text per line")


def from_format(file_format: FileFormat, path: Path, error_policy: ErrorPolicy) -> Iterator[Input]:
    """Yield the examples of a file in a registered format, without their labels, each with its row of the file."""
    from qkv.data import formats

    name = file_format.name
    if formats.get_format(name).splits_in_folders(path):
        raise InputError(f"{path}: has folders of several splits; name one of them, such as {path / 'test'}")
    known_options = formats.reader_options(name)
    hidden_columns: dict[str, Any] = {column: None for column in _GOLD_COLUMNS if column in known_options}
    if "scheme" in known_options:
        hidden_columns["scheme"] = "none"  # tags are labels, so they are not checked
    empty = True
    columns = file_format.columns | hidden_columns
    for example, row in formats.iter_examples_with_rows(name, path, error_policy, columns=columns):
        empty = False
        unlabeled = example.without_label()
        yield Input(unlabeled.to_line(), unlabeled.location, unlabeled, row)
    if empty and not error_policy.errors:
        raise InputError(f"{path}: empty, no examples in it; give a file with at least one")


def from_file(file_format: FileFormat, path: Path, error_policy: ErrorPolicy) -> TakeInputs:
    """Take the inputs of a file."""
    from qkv.tasks.input_files import LINES

    is_lines = file_format.name == LINES
    inputs = from_lines(path, error_policy) if is_lines else from_format(file_format, path, error_policy)
    return from_iterator(inputs)


def check_source(texts: Sequence[str], file: Path | None, file_options: Mapping[str, Any]) -> None:
    """Refuse texts together with a file, options of a file without one, and a file that does not exist."""
    if file is not None and texts:
        raise InputError("give TEXT or --file, not both")
    ignored = [option for option, value in file_options.items() if value]
    if file is None and ignored:
        raise InputError(f"{ignored[0]} is for the file of --file; add it, or leave the option out")
    # the reader of a format may know names that are no files
    if file is not None and not file_options.get("--format") and not os.path.lexists(file):
        raise InputError(f"{file}: no such file; check the path")


def from_args_or_stdin(texts: Sequence[str], error_policy: ErrorPolicy) -> TakeInputs | None:
    """Take the texts of the command line or the lines of stdin; None: they are typed at a prompt."""
    if list(texts) == ["-"] or (not texts and not sys.stdin.isatty()):
        return from_stdin(error_policy)
    return from_iterator(from_args(texts)) if texts else None


def parse_reader_options(options: list[str] | None, **named: Any) -> dict[str, Any]:
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

    def __init__(
        self, predict: Callable[[Sequence[Input], int], Sequence[TaskPrediction]], error_policy: ErrorPolicy
    ) -> None:
        self._predict, self._error_policy = predict, error_policy
        self.skipped = 0
        self._reasons: list[str] = []

    def iter_windows(self, take: TakeInputs) -> Iterator[tuple[int, list[Prediction]]]:
        """Yield the number of inputs of each window, and the inputs that could be predicted with their predictions."""
        first_index, window_index, any_succeeded = 0, 0, False
        while True:
            size = _FIRST_WINDOW_SIZES[window_index] if window_index < len(_FIRST_WINDOW_SIZES) else _WINDOW_SIZE
            window = take(size)
            window_index += 1
            predictions = self._predict_window(window, first_index) if window else []
            self._collect_reasons()
            any_succeeded = any_succeeded or bool(predictions)
            self._check_any(any_succeeded)
            if not window:
                return
            yield len(window), predictions
            first_index += len(window)

    def iter_stream(
        self, take: TakeInputs, predict_stream: Callable[[Iterator[Input]], Iterator[TaskPrediction | InputError]]
    ) -> Iterator[tuple[int, list[Prediction]]]:
        """Yield the same in shorter windows, of a predictor that reads inputs while it works on others."""
        waiting: deque[Input] = deque()
        reader_errors: list[InputError] = []

        def read() -> Iterator[Input]:
            try:
                while window := take(1):  # a bad input loses none of those before it
                    waiting.extend(window)
                    yield from window
            except InputError as error:  # the inputs before the bad one are predicted first
                reader_errors.append(error)

        results, any_succeeded = predict_stream(read()), False
        while chunk := list(islice(results, _CHUNK_SIZE)):
            predictions: list[Prediction] = []
            for result in chunk:
                item = waiting.popleft()
                if not isinstance(result, InputError):
                    predictions.append((item, result))
                elif self._error_policy.skip:
                    self._error_policy.errors.append(one_line(result))
                else:
                    yield len(predictions), predictions
                    raise result
            self._collect_reasons()
            any_succeeded = any_succeeded or bool(predictions)
            self._check_any(any_succeeded)
            yield len(chunk), predictions
        if reader_errors:
            raise reader_errors[0]
        self._collect_reasons()  # of the reader
        self._check_any(any_succeeded)

    def _check_any(self, any_succeeded: bool) -> None:
        if not any_succeeded and self.skipped:  # all failed: the inputs are hardly the reason
            raise InputError(f"all examples are bad, the first: {self._reasons[0]}")

    def _predict_window(self, window: Sequence[Input], first_index: int) -> list[Prediction]:
        """Return the inputs with their predictions; a bad input is refused, or found by bisection and skipped."""
        try:
            return list(zip(window, self._predict(window, first_index), strict=True))
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
