"""Readers of the tasks' data: `read(format, path)` gives the examples of `qkv.data.examples`."""

from qkv.data.formats.registry import FORMATS, DatasetFormat, has_splits, read, reader_options

__all__ = ["FORMATS", "DatasetFormat", "has_splits", "read", "reader_options"]
