"""The format of a file by the class of a task's examples and the file's name."""

from __future__ import annotations

import os
from pathlib import Path

from qkv.data.examples import ImageExample, MultipleChoiceExample, QAExample, TaggedExample, TextExample
from qkv.data.formats.io import file_suffix
from qkv.data.formats.registry import FORMATS
from qkv.data.formats.rows import is_saved_dataset
from qkv.data.formats.table import SUFFIXES
from qkv.data.pair import Pair, SourceWithReferences
from qkv.errors import InputError

_CONLL_SUFFIXES = dict.fromkeys((".conll", ".bio", ".iob", ".txt", ".tsv", ".annotated"), "conll")
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_PARQUET = ".parquet"
_FORMAT_BY_SUFFIX: dict[type, dict[str, str]] = {
    TextExample: dict(SUFFIXES),
    TaggedExample: _CONLL_SUFFIXES | {".conllu": "conllu"} | dict.fromkeys((*_JSON_SUFFIXES, _PARQUET), "words"),
    QAExample: {".json": "squad", ".jsonl": "questions", ".ndjson": "questions", _PARQUET: "questions"},
    MultipleChoiceExample: dict.fromkeys(SUFFIXES, "choices"),
    ImageExample: dict.fromkeys(SUFFIXES, "images"),
    Pair: {".tsv": "pairs:tsv", ".jsonl": "pairs:jsonl", ".ndjson": "pairs:jsonl", ".json": "pairs:jsonl"}
    | {".csv": "parallel", _PARQUET: "parallel", ".dict": "cmudict"},
    SourceWithReferences: dict.fromkeys(SUFFIXES, "summaries"),
}
_IDX_MARKER = "idx3-ubyte"  # in the names of MNIST's image files


def infer_format(example_type: type, path: str | Path) -> str:
    """Return the name of the format of a file or folder, by its name, for examples of a class."""
    path = Path(path)
    by_suffix = _FORMAT_BY_SUFFIX.get(example_type, {})
    is_folder = os.path.isdir(path)
    if is_folder and is_saved_dataset(path) and _PARQUET in by_suffix:
        return by_suffix[_PARQUET]
    if example_type is ImageExample and (is_folder or _IDX_MARKER in path.name):
        return "idx" if _IDX_MARKER in path.name or any(path.glob(f"*{_IDX_MARKER}*")) else "images"
    if is_folder:
        raise InputError(f"{path}: is a folder; give the format of its files, --format (see docs/data.md)")
    if file_suffix(path) in by_suffix:
        return by_suffix[file_suffix(path)]
    if not os.path.exists(path):
        raise InputError(f"{path}: no such file or folder; check the path")
    registered = [name for name in FORMATS.names() if FORMATS.get(name).example_type is example_type]
    names = ", ".join(dict.fromkeys(by_suffix.values())) or ", ".join(registered)
    raise InputError(f"{path}: the format is not clear from the file name; give --format, one of {names}")
