"""The examples of a task's recipe: its parts, and which part an example belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from qkv.data.examples import Choice, Examples, Labelled, Pictured, Question, Tagged
from qkv.data.pair import unit_hash
from qkv.data.tasks import has_parts, read
from qkv.errors import InputError
from qkv.train.sections import TaskData

PARTS = {"valid": "dev"}  # what a format calls a part, where it calls it otherwise


def read_part(data: TaskData, part: str) -> Examples[Any]:
    """The examples of `train`, `valid` or `test`: of their own file, of a folder's own part, or held out of `train`."""
    path = getattr(data, part)
    held = path is None and (part in data.hold_out or (part == "valid" and data.fold is not None))
    named = data.train if path is None else path
    files = named if isinstance(named, list) else [named]
    if path is None and not held and not all(has_parts(data.format, file) for file in files):
        raise InputError(f"the recipe has no '{part}' data; give data.{part}, or a share under data.hold_out")
    found: Examples[Any] = Examples()
    for file in files:
        own = "train" if held else PARTS.get(part, part)  # of a folder; a file is taken whole
        some = read(data.format, file, part=own, columns=data.columns, skip_bad=data.skip_bad)
        found.extend(some)
        found.skipped += some.skipped
    if held or (part == "train" and (data.hold_out or data.fold)):
        return Examples([one for one in found if _part_of(one, data) == part], found.skipped)
    return found


def _part_of(example: Any, data: TaskData) -> str:
    """By a hash of what it says, so that new lines never move old ones."""
    told = _told(example, data.together)
    place, below = unit_hash(told), 0.0
    for name in sorted(data.hold_out):
        below += data.hold_out[name]
        if place < below and getattr(data, name) is None:
            return name
    if data.fold is not None and _fold(told, data.fold[1]) == data.fold[0]:
        return "valid"
    return "train"


def fold_of(example: Any, together: str | None, count: int) -> int:
    """Which of so many parts an example is held out in, from 1."""
    return _fold(_told(example, together), count)


def _fold(told: str, count: int) -> int:
    return int(unit_hash(told, "fold") * count) + 1


def _told(example: Any, together: str | None) -> str:
    """What decides on an example's part: the field that is named, of a question its context, else all that it says."""
    if together is not None:
        value = getattr(example, together, None)
        if not isinstance(value, str) or not value:
            raise InputError(f"data.together: {example.where} has no '{together}'; name what all examples have")
        return value
    if isinstance(example, Pictured):
        return example.content().hex()
    if isinstance(example, Question):  # or the model is asked about texts that it has learned
        return example.context
    return repr(replace(example, where="") if hasattr(example, "where") else example)


def texts(examples: Iterable[Any]) -> Iterator[str]:
    """All that examples say, for a tokeniser to be trained on."""
    for one in examples:
        if isinstance(one, Labelled):
            yield from (text for text in (one.text, one.second) if text is not None)
        elif isinstance(one, Tagged):
            yield one.text
        elif isinstance(one, Question):
            yield from (one.question, one.context)
        elif isinstance(one, Choice):
            yield from (text for text in (one.context, one.second, *one.options) if text is not None)
