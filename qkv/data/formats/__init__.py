"""Dataset formats: `read(format, path)` returns the examples of a file (`qkv.data.examples`, `qkv.data.pair`)."""

from qkv.data.formats.inference import infer_format
from qkv.data.formats.loading import iter_examples, iter_examples_with_rows, read, read_files, read_splits
from qkv.data.formats.registry import (
    FORMATS,
    DatasetFormat,
    get_format,
    has_splits,
    pair_format_name,
    pair_formats,
    reader_options,
    register_format,
)

__all__ = [
    "FORMATS",
    "DatasetFormat",
    "get_format",
    "has_splits",
    "infer_format",
    "iter_examples",
    "iter_examples_with_rows",
    "pair_format_name",
    "pair_formats",
    "read",
    "read_files",
    "read_splits",
    "reader_options",
    "register_format",
]
