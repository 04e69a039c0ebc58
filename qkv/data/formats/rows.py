"""Records that are not lines of text: Parquet and Arrow files, folders of Hugging Face `datasets`, objects in memory.

Integers of a column whose metadata has class names (`ClassLabel` of `datasets`) become those names.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from qkv.data.compression import INSTALL_HINT
from qkv.errors import InputError, quote
from qkv.files import open_file, read_json
from qkv.json_reader import parse_json

SUFFIXES = (".parquet", ".arrow")
_SAVED_DATASET, _SAVED_SPLITS = "state.json", "dataset_dict.json"  # files that `save_to_disk` writes
_FEATURES_KEY = b"huggingface"  # in the metadata of a schema
_BATCH_ROWS = 1024

ClassNames = Mapping[str, Sequence[str]]  # names of the classes by column


@dataclass(frozen=True)
class MemoryRows:
    """Records in memory, which the readers of tables take in place of a path."""

    name: str
    """Kind of the object, for locations such as "DataFrame: row 3"."""
    records: Iterable[Mapping[str, Any]]
    class_names: ClassNames = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


Source = Path | MemoryRows  # what a reader of tables or of JSON lines reads


def is_saved_dataset(path: Path) -> bool:
    """Return whether a folder was written by `save_to_disk` of `datasets`, as one split or several."""
    return any(os.path.isfile(path / name) for name in (_SAVED_DATASET, _SAVED_SPLITS))


def has_saved_splits(path: Path) -> bool:
    """Return whether a folder of `save_to_disk` has several splits."""
    return os.path.isfile(path / _SAVED_SPLITS)


def has_stored_records(source: Source) -> bool:
    """Return whether the records of a source are read by `iter_stored_records`."""
    return isinstance(source, MemoryRows) or source.suffix.lower() in SUFFIXES or is_saved_dataset(source)


def iter_stored_records(source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location ("file: row 3") and the fields of each record."""
    if isinstance(source, MemoryRows):
        records, class_names = source.records, source.class_names
        for number, record in enumerate(records, 1):
            yield f"{source}: row {number}", _with_class_names(record, class_names)
        return
    number = 0
    for path in _arrow_files(source):
        for record in _iter_arrow_file(path, number):
            number += 1
            yield f"{source}: row {number}", record


def class_names_of_features(features: Any) -> dict[str, Sequence[str]]:
    """Return the class names by column of the features of a Hugging Face dataset: its objects, or their JSON form."""
    names: dict[str, Sequence[str]] = {}
    for column, feature in features.items() if isinstance(features, Mapping) else ():
        inner = _attribute(feature, "feature")  # of a sequence
        if isinstance(feature, list) and len(feature) == 1:
            inner = feature[0]
        class_names = _attribute(feature, "names") or _attribute(inner, "names")
        if isinstance(class_names, list | tuple) and all(isinstance(name, str) for name in class_names):
            names[str(column)] = class_names
    return names


def _attribute(feature: Any, name: str) -> Any:
    return feature.get(name) if isinstance(feature, Mapping) else getattr(feature, name, None)


def _with_class_names(record: Mapping[str, Any], class_names: ClassNames) -> dict[str, Any]:
    fields = {str(name): _to_python(value) for name, value in record.items()}
    return fields | {name: _class_name(fields[name], class_names[name]) for name in class_names.keys() & fields.keys()}


def _class_name(value: Any, names: Sequence[str]) -> Any:
    """Return the name of a class index, or the names of a list of them; -1 marks an unlabeled example."""
    if isinstance(value, list):
        return [_class_name(item, names) for item in value]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return names[value] if 0 <= value < len(names) else None


def _to_python(value: Any) -> Any:
    """Return a value of NumPy or pandas as one of Python."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, Mapping):
        return {str(name): _to_python(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_python(item) for item in value]
    ndim = getattr(value, "ndim", None)
    if ndim in (0, 1) and hasattr(value, "tolist"):  # images have two dimensions or more and stay arrays
        return _to_python(value.tolist())
    return value


# ---- Arrow ----------------------------------------------------------------------------------------------------------


def _arrow_files(path: Path) -> list[Path]:
    """Return the Parquet or Arrow files of a path: the file itself, or those of a folder of `save_to_disk`."""
    if not os.path.isdir(path):
        return [path]
    state = read_json(path / _SAVED_DATASET)
    files = state.get("_data_files") if isinstance(state, dict) else None
    files = files if isinstance(files, list) else []
    names = [item.get("filename") if isinstance(item, dict) else None for item in files]
    file_names = [name for name in names if isinstance(name, str) and name == os.path.basename(name)]
    if not names or len(file_names) < len(names):
        raise InputError(f"{path / _SAVED_DATASET}: names no data files of this folder; save the dataset again")
    if isinstance(state, dict) and state.get("_indices_data_files"):
        raise InputError(f"{path}: its rows are selected by indices; call flatten_indices() and save the dataset again")
    return [path / name for name in file_names]


def _iter_arrow_file(path: Path, first_row: int) -> Iterator[dict[str, Any]]:
    row = first_row
    with _arrow_errors(path), open_file(path) as file:
        if not os.fstat(file.fileno()).st_size:
            return
        if path.suffix.lower() != ".arrow":
            reader = import_module("pyarrow.parquet").ParquetFile(file)
            schema, batches = reader.schema_arrow, reader.iter_batches(batch_size=_BATCH_ROWS)
        else:
            reader = import_module("pyarrow.ipc").open_stream(file)
            schema, batches = reader.schema, iter(reader)
        _check_names(schema.names, path)
        class_names = class_names_of_features(_stored_features(schema, path))
        for batch in batches:
            for record in batch.to_pylist():
                row += 1
                yield _with_class_names(record, class_names)


def _check_names(names: Sequence[str], path: Path) -> None:
    duplicate = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if duplicate is not None:
        raise InputError(f"{path}: several columns have the name {quote(duplicate)}; rename all but one")


def _stored_features(schema: Any, path: Path) -> Any:
    """Return the features that `datasets` writes into the metadata of a file, as JSON."""
    metadata = (schema.metadata or {}).get(_FEATURES_KEY)
    info = parse_json(metadata, f"{path}: metadata") if metadata is not None else {}
    return (
        info.get("info", {}).get("features", {})
        if isinstance(info, dict) and isinstance(info.get("info"), dict)
        else {}
    )


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    try:
        pyarrow = import_module("pyarrow")
    except ImportError:
        raise InputError(f"{path}: Parquet needs the package pyarrow: {INSTALL_HINT}") from None
    try:
        yield
    except InputError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, OverflowError, MemoryError) as problem:
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise InputError(f"{path}: damaged Parquet or Arrow file ({quote(reason)}); copy it again") from None
