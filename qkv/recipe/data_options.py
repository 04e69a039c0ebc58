"""Options of a dataset's reader that have keys of their own in the section `data`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qkv.errors import InputError

IN_MEMORY = "(in memory)"  # instead of a file name in the recipe of a run that `qkv.fit` trained on data in memory
READER_KEYS = ("delimiter", "encoding")


def reader_options_of(columns: Mapping[str, Any], delimiter: str | None, encoding: str | None) -> dict[str, Any]:
    """Return the options of a reader: the columns, and delimiter and encoding if they are set."""
    options = {"delimiter": delimiter, "encoding": encoding}
    return {**columns, **{name: value for name, value in options.items() if value is not None}}


def check_reader_options(columns: Mapping[str, Any], delimiter: str | None, encoding: str | None) -> None:
    """Refuse an option that is set twice; a ValueError becomes the message of the section."""
    for name, value in (("delimiter", delimiter), ("encoding", encoding)):
        if value is not None and columns.get(name, value) != value:
            raise ValueError(f"{name} and columns.{name} differ; set one of them")


def check_in_files(paths: Any) -> None:
    """Refuse to read the data of a run that was trained on data in memory."""
    if paths == IN_MEMORY or (isinstance(paths, list) and IN_MEMORY in paths):
        raise InputError("this run was trained on data in memory; give the data again (data=, or --data FILE)")
