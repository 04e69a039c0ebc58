"""The format and the columns of a file of inputs: those given, else those of the model's run, else by the file name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkv.data import formats
from qkv.data.examples import TextExample
from qkv.data.formats.dialect import RememberedDelimiter
from qkv.data.formats.io import file_suffix
from qkv.errors import InputError
from qkv.recipe import Recipe
from qkv.recipe.schema import FinetuneRecipe, PairDataset, PretrainingRecipe, Seq2SeqRecipe

LINES = "lines"  # the name of the format of one text per line, which is no format of labeled examples
_LINE_SUFFIXES = ("", ".txt")
_SOURCE_DEFAULTS = {"parallel": "source", "summaries": "document"}  # column of the source by format of pairs


@dataclass(frozen=True)
class FileFormat:
    """How a file of examples is read: the name of a registered format, or `LINES`, and the options of its reader."""

    name: str
    columns: dict[str, Any] = field(default_factory=dict)


def input_format(
    path: Path,
    example_type: type,
    recipe: Recipe | None = None,
    format: str | None = None,
    columns: Mapping[str, Any] | None = None,
) -> FileFormat:
    """Return how a file of inputs is read.

    Args:
        path: the file.
        example_type: class of the task's examples.
        recipe: the recipe of the model's run, whose format and columns are the defaults; None: a plain checkpoint.
        format: the format, which takes precedence; `LINES` reads one text per line.
        columns: columns and other options of the reader, which take precedence.
    """
    run = None if recipe is None else _run_format(recipe, path)
    name = format or _infer(path, example_type, run)
    if name == LINES:
        if columns:
            option = next(iter(columns)).replace("_", "-")
            raise InputError(f"{path}: is read as one text per line and has no columns ('{option}'); give its --format")
        return FileFormat(LINES)
    return FileFormat(name, _run_columns(run, name) | dict(columns or {}))


def labeled_format(
    path: Path,
    example_type: type,
    recipe: FinetuneRecipe | None = None,
    format: str | None = None,
    columns: Mapping[str, Any] | None = None,
) -> FileFormat:
    """Return how a file of labeled examples is read; a file without a telling name is read as the run's data."""
    run = None if recipe is None else _run_format(recipe, path)
    name = format
    if name is None and path.is_dir():
        name = _infer_of_folder(path, example_type, run)
    if name is None and run is not None and (_accepts(run.name, path) or file_suffix(path) in _LINE_SUFFIXES):
        name = run.name
    if name is None:
        name = formats.infer_format(example_type, path)
    return FileFormat(name, _run_columns(run, name) | dict(columns or {}))


def _infer(path: Path, example_type: type, run: FileFormat | None) -> str:
    if path.is_dir():
        return _infer_of_folder(path, example_type, run)
    if file_suffix(path) in _LINE_SUFFIXES:
        return LINES
    if run is not None and _accepts(run.name, path):
        return run.name
    try:
        return formats.infer_format(example_type, path)
    except InputError:
        if not path.exists():
            raise
        return LINES  # a suffix such as .de tells nothing, and no table has it


def _accepts(format: str, path: Path) -> bool:
    """Return whether files of a format have the suffix of this one."""
    if format == LINES:
        return False
    files = formats.get_format(format).split_files
    named = {file_suffix(Path(name)) for names in files.files.values() for name in names}
    return file_suffix(path) in {*files.suffixes, *named}


def _infer_of_folder(path: Path, example_type: type, run: FileFormat | None) -> str:
    """Return the format that the files of a folder tell, else that of the run."""
    try:
        return formats.infer_format(example_type, path)
    except InputError:
        if run is None or run.name == LINES:
            raise
        return run.name


def _run_columns(run: FileFormat | None, format: str) -> dict[str, Any]:
    """Return the columns of a run that a format knows; delimiter and encoding belong to one format only."""
    if run is None or run.name == LINES:
        return {}
    known = set(formats.reader_options(format))
    if formats.get_format(format) is not formats.get_format(run.name):
        if run.columns.get("header") is False:  # its columns are numbers, which another file need not have
            return {}
        known -= {"delimiter", "encoding", "header", "file_type"}
    columns = {name: value for name, value in run.columns.items() if name in known and value is not None}
    if "delimiter" in columns:
        columns["delimiter"] = RememberedDelimiter(columns["delimiter"])
    return columns


def _run_format(recipe: Recipe, path: Path) -> FileFormat | None:
    """Return the format and the columns of a run's own data, as its inputs are read."""
    if isinstance(recipe, FinetuneRecipe):
        data = recipe.data
        return FileFormat(data.format, dict(data.columns) | _table_settings(data))
    if isinstance(recipe, Seq2SeqRecipe):
        return _source_format(next(iter(recipe.data.datasets_by_name.values())), path)
    if isinstance(recipe, PretrainingRecipe):
        suffix_format = "table" if file_suffix(path) not in _LINE_SUFFIXES else LINES
        return FileFormat(suffix_format, {"text": recipe.data.text_field})
    return None


def _table_settings(data: Any) -> dict[str, Any]:
    return {name: getattr(data, name) for name in ("delimiter", "encoding") if getattr(data, name, None) is not None}


def _source_format(dataset: PairDataset, path: Path) -> FileFormat:
    """Return how the sources of a file of pairs are read: as a table, so that targets need not be there."""
    assert dataset.format is not None  # the recipe's schema requires it
    columns = dict(dataset.columns)
    settings = {name: columns[name] for name in ("header", "file_type") if name in columns} | _table_settings(dataset)
    if dataset.format == "tsv":
        return FileFormat("tsv", {"text": "1", "header": False} | settings)
    if dataset.format == "jsonl":
        return FileFormat("jsonl", {"text": dataset.source_field})
    if dataset.format in _SOURCE_DEFAULTS:
        name = formats.infer_format(TextExample, path) if file_suffix(path) not in _LINE_SUFFIXES else LINES
        return FileFormat(name, {"text": columns.get("source", _SOURCE_DEFAULTS[dataset.format])} | settings)
    if formats.get_format(formats.pair_format_name(dataset.format)).second_file_option is not None:
        return FileFormat(LINES)  # one file has the sources, line by line
    return FileFormat(formats.pair_format_name(dataset.format), columns)
