"""Examples from objects in memory: data frames of pandas, `datasets` of Hugging Face, Arrow tables, dicts and lists.

The packages are not imported: an object is recognized by its methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from qkv.data.examples import (
    Example,
    Examples,
    ImageExample,
    MultipleChoiceExample,
    QAExample,
    TaggedExample,
    TextExample,
)
from qkv.data.formats.loading import check_options
from qkv.data.formats.registry import get_format
from qkv.data.formats.rows import MemoryRows, class_names_of_features
from qkv.data.formats.table import collect_examples
from qkv.data.pair import Pair, SourceWithReferences
from qkv.errors import InputError, describe_value, quote

# formats whose readers take records, by the class of the examples; the first is the default
_ROW_FORMATS: dict[type, tuple[str, ...]] = {
    TextExample: ("table", "csv", "tsv", "jsonl", "parquet", "banking77"),
    TaggedExample: ("words",),
    QAExample: ("questions",),
    MultipleChoiceExample: ("choices", "arc", "commonsense_qa"),
    ImageExample: ("images",),
    Pair: ("parallel",),
    SourceWithReferences: ("summaries", "scitldr"),
}
_FILE_OPTIONS = ("delimiter", "encoding", "header", "file_type")  # options that only a file can need
_EXPECTED = "a data frame, a dataset, a table, a list of dicts or a dict of lists"


def read_rows(
    data: Any,
    format: str | None = None,
    example_type: type = TextExample,
    columns: Mapping[str, Any] | None = None,
    *,
    skip_bad: bool = False,
) -> Examples[Any]:
    """Return the examples of an object with named columns; examples are returned as they are.

    Args:
        data: a pandas DataFrame, a Hugging Face Dataset, a pyarrow Table, a list of dicts or a dict of lists.
        format: a format of rows, such as "choices" or "arc"; None, or the format of a file: that of the example type.
        example_type: class of the examples.
        columns: the column of each field, such as `{"text": "review"}`, and other options of the reader.
        skip_bad: list bad records in `skipped` instead of raising an error for the first one.
    """
    if isinstance(data, Sequence) and data and all(isinstance(item, Example) for item in data):
        return data if isinstance(data, Examples) else Examples(data)
    formats = _ROW_FORMATS.get(example_type)
    if formats is None:
        raise InputError(f"data: {example_type.__name__} examples are not read from rows; give a list of them")
    name = format if format in formats else formats[0]
    dataset_format = get_format(name)
    options = {key: value for key, value in (columns or {}).items() if key not in _FILE_OPTIONS}
    check_options(name, dataset_format, options)
    return collect_examples(dataset_format.reader, memory_rows(data), skip_bad, **options)


def is_row_data(data: Any) -> bool:
    """Return whether an object is one that `read_rows` takes, and not a path or a mapping of splits."""
    try:
        memory_rows(data)
    except InputError:
        return False
    return True


def memory_rows(data: Any) -> MemoryRows:
    """Return the records of an object with named columns."""
    name = type(data).__name__
    if isinstance(data, Mapping):
        return _rows_of_columns(data)
    if hasattr(data, "itertuples") and hasattr(data, "columns"):  # pandas
        names = [str(column) for column in data.columns]
        _check_unique(names, name)
        rows = data.itertuples(index=False, name=None)
        return MemoryRows(name, (dict(zip(names, row, strict=True)) for row in rows))
    if hasattr(data, "column_names") and hasattr(data, "features") and hasattr(data, "__getitem__"):  # datasets
        return MemoryRows(name, _iter_dataset(data), class_names_of_features(data.features))
    if hasattr(data, "to_batches") and hasattr(data, "schema"):  # pyarrow
        names = list(data.schema.names)
        _check_unique(names, name)
        return MemoryRows(name, (record for batch in data.to_batches() for record in batch.to_pylist()))
    if hasattr(data, "iter_rows") and hasattr(data, "schema"):  # polars
        return MemoryRows(name, data.iter_rows(named=True))
    has_no_items = getattr(data, "ndim", 1) == 0  # an array or tensor without dimensions
    if isinstance(data, Iterable) and not isinstance(data, str | bytes) and not has_no_items:
        records = list(data)
        if all(isinstance(record, Mapping) for record in records):
            return MemoryRows("data", records)
    raise InputError(f"data: expected {_EXPECTED}, not {describe_value(data)}")


def _iter_dataset(dataset: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the records of a Hugging Face dataset, which may have no length if it is streamed."""
    if hasattr(dataset, "__iter__"):
        yield from dataset
        return
    yield from (dataset[index] for index in range(len(dataset)))


def _rows_of_columns(columns: Mapping[Any, Any]) -> MemoryRows:
    if columns and all(hasattr(value, "column_names") for value in columns.values()):
        splits = ", ".join(map(str, columns))
        raise InputError(f"data: has the splits {splits}; give one of them, such as data['{next(iter(columns))}']")
    for name, values in columns.items():
        if isinstance(values, str | bytes) or not hasattr(values, "__len__") or not hasattr(values, "__iter__"):
            raise InputError(f"data: the column {quote(str(name))} is not a list; give a dict of lists")
    lengths = {len(values) for values in columns.values()}
    if len(lengths) > 1:
        raise InputError("data: the columns have different lengths; give lists of one length")
    names = [str(name) for name in columns]
    rows = zip(*columns.values(), strict=True)
    return MemoryRows("data", (dict(zip(names, row, strict=True)) for row in rows))


def _check_unique(names: Sequence[str], kind: str) -> None:
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{kind}: several columns have the name {quote(duplicate)}; rename all but one")
