"""Texts with their targets: parallel text in a table or in two files, documents with summaries, SciTLDR."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qkv.data.formats.fields import require_field, strings_field
from qkv.data.formats.io import ErrorPolicy, decode_line, json_records, read_raw_lines
from qkv.data.formats.table import Row, read_rows
from qkv.data.pair import Pair, SourceWithReferences
from qkv.errors import InputError


def read_parallel(
    path: Path,
    error_policy: ErrorPolicy,
    *,
    source: str = "source",
    target: str = "target",
    file_type: str | None = None,
    header: bool = True,
) -> Iterator[Pair]:
    """Pairs out of two columns of a table."""
    for row in read_rows(path, error_policy, required=(source, target), file_type=file_type, header=header):
        with error_policy:
            yield Pair(row.text(source), row.text(target), row.location)


def read_aligned(path: Path, error_policy: ErrorPolicy, *, targets: str) -> Iterator[Pair]:
    """Pairs out of two files, line by line; a pair of which one line is bad is bad."""
    source_lines, target_lines = list(read_raw_lines(path)), list(read_raw_lines(Path(targets)))
    if len(source_lines) != len(target_lines):
        counts = f"{path} has {len(source_lines)} lines and {targets} has {len(target_lines)}"
        raise InputError(f"{counts}; aligned files need a target line for each source line")
    for (location, source), (target_location, target) in zip(source_lines, target_lines, strict=True):
        with error_policy:
            fields = {"source": decode_line(source, location), "target": decode_line(target, target_location)}
            yield Pair(Row(location, fields).text("source"), Row(target_location, fields).text("target"), location)


def read_summaries(
    path: Path,
    error_policy: ErrorPolicy,
    *,
    source: str = "document",
    target: str = "summary",
    file_type: str | None = None,
    header: bool = True,
) -> Iterator[SourceWithReferences]:
    """Documents with their summaries out of two columns of a table; in JSON either may be a list: a document's
    sentences, and several summaries each of which is right."""
    for row in read_rows(path, error_policy, required=(source, target), file_type=file_type, header=header):
        with error_policy:
            yield _make_example(row, source, target)


def read_scitldr(path: Path, error_policy: ErrorPolicy) -> Iterator[SourceWithReferences]:
    """SciTLDR's JSON lines (Cachola et al., 2020): an abstract's sentences, or more, and its one-line summaries."""
    for location, record in json_records(path, error_policy, '{"source": ["…", …], "target": ["…", …]}'):
        with error_policy:
            yield _make_example(Row(location, record), "source", "target")


def _make_example(row: Row, source: str, target: str) -> SourceWithReferences:
    text = " ".join(_text_or_list(row, source))
    references = _text_or_list(row, target)
    return SourceWithReferences(text, tuple(dict.fromkeys(references)), row.location)  # equal references once, as `group_by_source` has them


def _text_or_list(row: Row, name: str) -> tuple[str, ...]:
    """A text or a list of them, none of them empty."""
    value: Any = require_field(row.fields, name, row.location)
    if not isinstance(value, list):
        return (row.text(name),)
    texts = tuple(text for text in strings_field(row.fields, name, row.location) if text.strip())
    if not texts:
        raise InputError(f"{row.location}: the column '{name}' is empty here; fill it in or remove the record")
    return texts
