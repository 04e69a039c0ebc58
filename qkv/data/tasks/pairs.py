"""Texts with their targets: parallel text in a table or in two files, documents with summaries, SciTLDR."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qkv.data.pair import Example, Pair
from qkv.data.tasks.fields import present, texts_field
from qkv.data.tasks.lines import Bad, decoded, objects, raw_lines
from qkv.data.tasks.table import Row, rows
from qkv.errors import InputError


def parallel(
    path: Path,
    bad: Bad,
    *,
    source: str = "source",
    target: str = "target",
    form: str | None = None,
    header: bool = True,
) -> Iterator[Pair]:
    """Pairs out of two columns of a table."""
    for row in rows(path, bad, needs=(source, target), form=form, header=header):
        with bad:
            yield Pair(row.text(source), row.text(target), row.where)


def aligned(path: Path, bad: Bad, *, targets: str) -> Iterator[Pair]:
    """Pairs out of two files, line by line; a pair of which one line is bad is bad."""
    sources, other = list(raw_lines(path)), list(raw_lines(Path(targets)))
    if len(sources) != len(other):
        counts = f"{path} has {len(sources)} lines and {targets} has {len(other)}"
        raise InputError(f"{counts}; aligned files need a target line for each source line")
    for (where, source), (there, target) in zip(sources, other, strict=True):
        with bad:
            row = {"source": decoded(source, where), "target": decoded(target, there)}
            yield Pair(Row(where, row).text("source"), Row(there, row).text("target"), where)


def summaries(
    path: Path,
    bad: Bad,
    *,
    source: str = "document",
    target: str = "summary",
    form: str | None = None,
    header: bool = True,
) -> Iterator[Example]:
    """Documents with their summaries out of two columns of a table; in JSON either may be a list: a document's
    sentences, and several summaries each of which is right."""
    for row in rows(path, bad, needs=(source, target), form=form, header=header):
        with bad:
            yield _summary(row, source, target)


def scitldr(path: Path, bad: Bad) -> Iterator[Example]:
    """SciTLDR's JSON lines (Cachola et al., 2020): an abstract's sentences, or more, and its one-line summaries."""
    for where, record in objects(path, bad, '{"source": ["…", …], "target": ["…", …]}'):
        with bad:
            yield _summary(Row(where, record), "source", "target")


def _summary(row: Row, source: str, target: str) -> Example:
    text = " ".join(_texts(row, source))
    references = _texts(row, target)
    return Example(text, tuple(dict.fromkeys(references)), row.where)  # equal references once, as `pair.group` has them


def _texts(row: Row, name: str) -> tuple[str, ...]:
    """A text or a list of them, none of them empty."""
    value: Any = present(row.fields, name, row.where)
    if not isinstance(value, list):
        return (row.text(name),)
    texts = tuple(text for text in texts_field(row.fields, name, row.where) if text.strip())
    if not texts:
        raise InputError(f"{row.where}: the column '{name}' is empty here; fill it in or remove the record")
    return texts
