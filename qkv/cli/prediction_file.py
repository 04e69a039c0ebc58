"""Files of predictions: the columns of the input with those of the prediction after them, written window by window."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.cli.input_stream import Prediction
    from qkv.tasks.predictions import TaskPrediction

NESTED_SUFFIXES = (".jsonl", ".parquet")  # of files whose cells can be lists
SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet", ".txt")
_PREDICTION = "prediction"
_COPIES = frozenset({"label", "text", "answer", "value"})  # fields of a prediction that say the same as the prediction
_WORDS = "tokens"  # column of the words of a tagged sentence


class RowWriter(Protocol):
    """A file of rows that is written in several steps."""

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows; the first ones determine the columns."""
        ...

    def close(self) -> None:
        """Complete the file."""
        ...


def check_output(output: Path, input_file: Path | None) -> None:
    """Refuse an unknown suffix, and the input file as output."""
    if output.suffix.lower() not in SUFFIXES:
        raise InputError(f"--output: {output} should end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if input_file is not None and output.exists() and input_file.exists() and output.samefile(input_file):
        raise InputError(f"--output: {output} is the input file; choose another name")


def make_row(prediction: Prediction, n_best: int, *, nested: bool) -> dict[str, Any]:
    """Return the columns of an input and of its prediction; `nested` values are lists, else they are texts."""
    item, task_prediction = prediction
    columns, added = item.columns, prediction_columns(task_prediction, nested=nested)
    if n_best > 1:
        added["alternatives"] = [{"text": text, "score": score} for text, score in task_prediction.alternatives]
    clash = next((name for name in added if name in columns), None)
    if clash is not None:
        raise InputError(f"{item.location}: has a column '{clash}' already, which the prediction needs; rename it")
    return columns | added


def prediction_columns(prediction: TaskPrediction, *, nested: bool) -> dict[str, Any]:
    """Return the columns of a prediction: `prediction`, its probability and the other values that are not nested."""
    columns: dict[str, Any] = {_PREDICTION: _nested_value(prediction) if nested else _plain_value(prediction)}
    for name, value in prediction.fields.items():
        is_plain = value is None or isinstance(value, str | int | float)
        if name == "words":  # raw text has none of its own, so they come with their tags
            words = [word["text"] for word in value]
            columns[_WORDS] = words if nested else " ".join(words)
        elif is_plain and name not in _COPIES:
            columns[name] = value
    return columns


def _nested_value(prediction: TaskPrediction) -> Any:
    """Return numbers, vectors, tags and sets of labels as JSON values, and any other prediction as its text."""
    value = prediction.prediction
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, float) else prediction.fields.get("vector", prediction.text)


def _plain_value(prediction: TaskPrediction) -> Any:
    """Return tags with spaces between them, numbers in full precision, and any other prediction as its text."""
    value = prediction.prediction
    if isinstance(value, tuple):
        return " ".join(value)
    return value if isinstance(value, float) else prediction.text


def open_writer(output: Path, path: Path) -> RowWriter:
    """Open a file of the kind that the suffix of `output` names, at the temporary `path`."""
    suffix = output.suffix.lower()
    if suffix == ".parquet":
        return _ParquetRows(path, output)
    makers: dict[str, Callable[[Path], RowWriter]] = {
        ".csv": _CsvRows,
        ".tsv": _TsvRows,
        ".jsonl": _JsonLines,
        ".txt": _TextLines,
    }
    return makers[suffix](path)


class _TextRows:
    """A text file of rows."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = open(path, "w", encoding="utf-8", newline="")  # noqa: SIM115  # closed by `close`

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _JsonLines(_TextRows):
    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)


class _TextLines(_TextRows):
    """One prediction per line, without the input."""

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._file.writelines(" ".join(_cell(row[_PREDICTION]).split()) + "\n" for row in rows)


class _CsvRows(_TextRows):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._columns: list[str] | None = None
        self._writer = csv.writer(self._file, lineterminator="\n")

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            if self._columns is None:
                self._columns = list(row)
                self._write_cells(self._columns)
            unknown = next((name for name in row if name not in self._columns), None)
            if unknown is not None:
                raise InputError(
                    f"--output: some inputs have the field '{unknown}' and the first has not; write .jsonl"
                )
            self._write_cells([_cell(row.get(name)) for name in self._columns])

    def _write_cells(self, cells: Iterable[str]) -> None:
        self._writer.writerow(cells)


class _TsvRows(_CsvRows):
    def _write_cells(self, cells: Iterable[str]) -> None:
        self._file.write("\t".join(" ".join(cell.split()) for cell in cells) + "\n")


def _cell(value: Any) -> str:
    """Return a value of a row as text; nested values of a JSON file as JSON."""
    if value is None:
        return ""
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


class _ParquetRows:
    """A Parquet file; the first rows determine the types of its columns."""

    def __init__(self, path: Path, output: Path) -> None:
        try:
            self._arrow: Any = import_module("pyarrow")
            self._parquet: Any = import_module("pyarrow.parquet")
        except ImportError:
            raise InputError(f"{output}: Parquet needs the package pyarrow; pip install pyarrow") from None
        self._path, self._output = path, output
        self._writer: Any = None
        self._schema: Any = None

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows of the types of the first ones."""
        if not rows:
            return
        try:
            table = self._arrow.Table.from_pylist([*rows], schema=self._schema or self._infer_schema(rows))
        except (self._arrow.ArrowInvalid, self._arrow.ArrowTypeError) as error:
            reason = str(error).splitlines()[0][:80]
            raise InputError(
                f"{self._output}: the columns have values of several types ({reason}); write .jsonl"
            ) from None
        if self._writer is None:
            self._writer = self._parquet.ParquetWriter(self._path, self._schema)
        self._writer.write_table(table)

    def _infer_schema(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        inferred = self._arrow.Table.from_pylist([*rows]).schema
        text = self._arrow.string()
        fields = [field.with_type(text) if self._arrow.types.is_null(field.type) else field for field in inferred]
        self._schema = self._arrow.schema(fields)
        return self._schema

    def close(self) -> None:
        """Complete the file."""
        if self._writer is None:
            raise InputError(f"{self._output}: there is no prediction to write")
        self._writer.close()
