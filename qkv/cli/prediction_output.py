"""Output of `qkv predict`: lines and JSON on stdout, or a file."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.cli.input_stream import Input, Prediction, StreamingPredictor, TakeInputs, from_args, progress_bar
from qkv.cli.prediction_file import NESTED_SUFFIXES, make_row, open_writer
from qkv.errors import InputError
from qkv.files import atomic_write

if TYPE_CHECKING:
    from qkv.data.formats.io import ErrorPolicy
    from qkv.tasks.predictions import TaskPrediction
    from qkv.tasks.predictor import Predictor


Windows = Iterator[tuple[int, list[Prediction]]]  # numbers of inputs, and the predictions of those that were good


class PredictionOutput:
    """Predictions of a stream of inputs, printed or written as they are made."""

    def __init__(self, predictor: Predictor, n_best: int, *, as_json: bool, with_scores: bool) -> None:
        self._predictor, self._n_best, self._as_json, self._with_scores = predictor, n_best, as_json, with_scores
        self._num_truncated = 0

    def run(
        self,
        take: TakeInputs,
        error_policy: ErrorPolicy,
        total: int | None,
        output: Path | None,
        *,
        read_ahead: bool = False,
    ) -> None:
        """Print the predictions of all inputs or write them to a file; warnings go to stderr.

        `read_ahead`: `take` never waits for input, so a model that generates text may read on while it decodes.
        """
        stream = StreamingPredictor(self._predict, error_policy)
        if read_ahead and self._predictor.task.name == "generation":
            windows = stream.iter_stream(take, self._predict_stream)
        else:
            windows = stream.iter_windows(take)
        if output is None:
            self._stream(windows, total, self._print)
        else:
            num_rows = self._write(windows, total, output)
            print(f"{output}: {num_rows:,} predictions")
        for line in [*error_policy.notes, *stream.warnings(), *self._truncation_warnings()]:
            print(line, file=sys.stderr)

    def print_text(self, text: str, *, stream: bool = False) -> None:
        """Print the output of one text, piece by piece as it is generated if it is a stream."""
        if stream:
            self._print_stream(text)
            return
        inputs = list(from_args([text]))
        print("\n".join(self._format_lines(inputs[0], self._predict(inputs, 0)[0])))

    def _predict(self, inputs: Sequence[Input], first_index: int) -> list[TaskPrediction]:
        values = [item.text if item.example is None else item.example for item in inputs]
        locations = [item.location for item in inputs]
        predictions = self._predictor(values, self._n_best, locations, first_index)
        self._num_truncated += sum(prediction.truncated for prediction in predictions)
        return predictions

    def _predict_stream(self, inputs: Iterator[Input]) -> Iterator[TaskPrediction | InputError]:
        values = ((item.text if item.example is None else item.example, item.location) for item in inputs)
        for prediction in self._predictor.predict_stream(values, self._n_best):
            self._num_truncated += not isinstance(prediction, InputError) and prediction.truncated
            yield prediction

    def print_pieces(self, take: TakeInputs, error_policy: ErrorPolicy) -> None:
        """Print the text of each input piece by piece, as it is generated, and end it with a line end."""
        while inputs := take(1):
            for item in inputs:
                with error_policy:
                    self._print_stream(item.text if item.example is None else item.example, item.location)
        for line in [*error_policy.notes, *error_policy.errors]:
            print(line, file=sys.stderr)

    def _print_stream(self, value: Any, location: str | None = None) -> None:
        with warnings.catch_warnings(record=True) as caught:  # shown below the text
            for piece in self._predictor.stream(value, location):
                print(piece, end="", flush=True)
        print(flush=True)
        for warning in caught:
            warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)

    @staticmethod
    def _stream(windows: Windows, total: int | None, use: Callable[[list[Prediction]], None]) -> None:
        with progress_bar(total) as step:
            for num_inputs, predictions in windows:
                use(predictions)
                step(num_inputs)

    def _print(self, predictions: list[Prediction]) -> None:
        lines = [line for item, prediction in predictions for line in self._format_lines(item, prediction)]
        if lines:
            print("\n".join(lines), flush=True)

    def _write(self, windows: Windows, total: int | None, output: Path) -> int:
        """Write a file, which appears when it is complete, and return its number of rows."""
        num_rows = 0
        nested = output.suffix.lower() in NESTED_SUFFIXES

        def write(tmp_path: Path) -> None:
            writer = open_writer(output, tmp_path)

            def append(predictions: list[Prediction]) -> None:
                nonlocal num_rows
                writer.write([make_row(prediction, self._n_best, nested=nested) for prediction in predictions])
                num_rows += len(predictions)

            with contextlib.closing(writer):
                self._stream(windows, total, append)

        atomic_write(output, write)
        return num_rows

    def _format_lines(self, item: Input, prediction: TaskPrediction) -> list[str]:
        if self._as_json:
            return [json.dumps(item.fields | prediction.fields, ensure_ascii=False)]
        if not self._with_scores:
            return [_one_line(prediction.text) + _alignment_column(prediction.fields)]
        alternatives = prediction.alternatives or ((prediction.text, prediction.score or 0.0),)
        columns: Iterable[str] = repeat("")
        if "alignment" in prediction.fields:
            columns = map(_alignment_column, prediction.fields.get("alternatives", [prediction.fields]))
        return [
            f"{_one_line(item.text)}\t{score:.4f}\t{_one_line(output)}{column}"
            for (output, score), column in zip(alternatives, columns, strict=False)
        ]

    def _truncation_warnings(self) -> list[str]:
        subject = "1 text was" if self._num_truncated == 1 else f"{self._num_truncated:,} texts were"
        return [f"{subject} truncated to the model's maximum length"] if self._num_truncated else []


def _one_line(text: str) -> str:
    """Replace tabs and line ends, which separate the columns and rows of the output."""
    return " ".join(text.split()) if any(char in text for char in "\t\n\r") else text


def _alignment_column(fields: Mapping[str, Any]) -> str:
    """Return the alignment of an output as pairs of source and target tokens, after a tab; empty without one."""
    pairs = [f"{source}-{target}" for target, source in enumerate(fields.get("alignment", ()))]
    return "\t" + " ".join(pairs) if "alignment" in fields else ""


def run_interactive(print_output: Callable[[str], None]) -> None:
    """Print the output of each line that is typed at a prompt."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives the prompt history and editing
    print("Type a text and press Enter; an empty line ends.")
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not text:
            return
        try:
            print_output(text)
        except InputError as error:  # an invalid line does not end the session
            print(error)
