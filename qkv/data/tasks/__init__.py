"""Readers of the tasks' data: `read(format, path)` gives the examples of `qkv.data.examples`."""

from qkv.data.tasks.formats import FORMATS, Format, has_parts, read, settings_of

__all__ = ["FORMATS", "Format", "has_parts", "read", "settings_of"]
