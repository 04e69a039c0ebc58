"""The pairs of a recipe, set by set: from their files, from a folder's parts, or held out of the training file."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path

from qkv.data import tasks
from qkv.data.pair import Example, Pair, group, hold_out
from qkv.data.readers import FORMATS, read_pairs
from qkv.errors import InputError
from qkv.train.sections import Data, PairSet

PARTS = {"valid": "dev"}  # what a format calls a part, where it calls it otherwise


def read_part(data: Data, part: str) -> list[Pair]:
    """The pairs of `train`, `valid` or `test`, of all sets."""
    return [pair for pairs in read_sets(data, part).values() for pair in pairs]


def read_sets(data: Data, part: str) -> dict[str, list[Pair]]:
    """The same by the name of their set, each source with the set's prefix before it."""
    return {name: _prefixed(_read_part(one, part, name), one.prefix) for name, one in data.sets.items()}


def as_examples(pairs: list[Pair], by_source: bool) -> list[Example]:
    """Sources with their references: all that a source has anywhere, or those that stand in one place with it."""
    if by_source:
        return group(pairs)
    found = []
    for (where, source), some in groupby(pairs, lambda pair: (pair.where, pair.source)):
        found.append(Example(source, tuple(dict.fromkeys(pair.target for pair in some)), where))
    return found


def _prefixed(pairs: list[Pair], prefix: str) -> list[Pair]:
    return [replace(pair, source=prefix + pair.source) for pair in pairs] if prefix else pairs


def _read_part(one: PairSet, part: str, name: str) -> list[Pair]:
    path = getattr(one, part)
    if path is not None and not (part == "train" and one.hold_out):
        return _read(one, path, part)
    assert one.train is not None  # the section refuses a set without it
    if part == "train" or part in one.hold_out:
        return hold_out(_read(one, one.train, "train"), one.hold_out)[part]
    if one.format not in FORMATS and isinstance(one.train, str) and Path(one.train).is_dir():
        return _read(one, one.train, part)
    which = f"the recipe's set '{name}'" if name else "the recipe"
    raise InputError(f"{which} has no '{part}' data; give data.{part}, or a share under data.hold_out")


def _read(one: PairSet, path: str | list[str], part: str) -> list[Pair]:
    files = [path] if isinstance(path, str) else path
    if one.format == "aligned":
        if len(files) != 2:
            raise InputError(f"data.format aligned takes two files, [source, target], not {len(files)}")
        return read_pairs("aligned", files[0], target_path=files[1])
    return [pair for file in files for pair in _read_file(one, file, part)]


def _read_file(one: PairSet, file: str, part: str) -> list[Pair]:
    assert one.format is not None
    if one.format in FORMATS:
        fields = {"source_field": one.source_field, "target_field": one.target_field}
        return read_pairs(one.format, file, stress=one.stress, **fields)
    found = tasks.read(one.format, file, part=PARTS.get(part, part), columns=one.columns)
    return [pair for example in found for pair in _pairs(example)]


def _pairs(example: Pair | Example) -> list[Pair]:
    """One a reference: what a document may be summed up as is learned in all its forms."""
    if isinstance(example, Pair):
        return [example]
    return [Pair(example.source, reference, example.where) for reference in example.references]
