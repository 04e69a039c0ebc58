"""The splits of a fine-tuning recipe's examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from qkv.data import formats
from qkv.data.examples import Example, Examples
from qkv.data.splitting import assign_split, split_by_position, unit_hash
from qkv.errors import InputError
from qkv.recipe.data_options import READER_KEYS, check_in_files
from qkv.recipe.schema import PairDataset, TaskData

SPLITS = ("train", "valid", "test")
SectionT = TypeVar("SectionT", bound=TaskData | PairDataset)


def read_split(data: TaskData, split: str) -> Examples[Any]:
    """Read the examples of "train", "valid" or "test"."""
    return read_splits(data, [split])[split]


def read_splits(data: TaskData, splits: Sequence[str]) -> dict[str, Examples[Any]]:
    """Read splits that are in their own files, in a folder, or held out from `train`; each file is read once."""
    check_in_files(data.train)
    return formats.read_splits(
        data.format,
        {"train": data.train, "valid": data.valid, "test": data.test},
        splits,
        held_out={*data.hold_out, *(() if data.fold is None else ("valid",))},
        divide=lambda examples: divide(examples, data),
        columns=data.reader_options,
        skip_bad=data.skip_bad,
    )


def with_detected_options(data: SectionT, splits: Iterable[Examples[Any]]) -> SectionT:
    """Return a section with the delimiter and encoding that its files were read with, if it leaves them open.

    Files with different ones are read by detection again.
    """
    assert data.format is not None  # the recipe's schema requires it
    is_pairs = isinstance(data, PairDataset)
    known_options = formats.reader_options(formats.pair_format_name(data.format) if is_pairs else data.format)
    files = [options for split in splits for options in split.detected.values()]
    changes: dict[str, Any] = {}
    for name in READER_KEYS:
        values = {options[name] for options in files if name in options}
        if len(values) == 1 and name in known_options and name not in data.reader_options:
            changes[name] = values.pop()
    return replace(data, **changes) if changes else data


def divide(examples: Sequence[Example], data: TaskData) -> dict[str, list[Example]]:
    """Divide training examples into the splits that a recipe holds out from them."""
    splits: dict[str, list[Example]] = {name: [] for name in SPLITS}
    if data.split_by == "position":
        own_files = {name for name in SPLITS if name != "train" and getattr(data, name) is not None}
        fractions: dict[str, float] = {name: x for name, x in data.hold_out.items() if name not in own_files}
        return splits | split_by_position(examples, fractions)
    for example in examples:
        splits[_split_of(example, data)].append(example)
    return splits


def _split_of(example: Example, data: TaskData) -> str:
    """Return the split of an example by a hash of its key, so that new examples never move old ones."""
    key = _split_key(example, data.group_by)
    with_own_files = [name for name in SPLITS if getattr(data, name) is not None]
    fractions: dict[str, float] = dict(data.hold_out.items())
    split = assign_split(key, fractions, exclude=with_own_files)
    if split == "train" and data.fold is not None and _fold_of_key(key, data.fold[1]) == data.fold[0]:
        return "valid"
    return split


def fold_of(example: Example, group_by: str | None, count: int) -> int:
    """Return the fold, from 1 to `count`, in which an example is held out."""
    return _fold_of_key(_split_key(example, group_by), count)


def _fold_of_key(key: str, count: int) -> int:
    return int(unit_hash(key, "fold") * count) + 1


def _split_key(example: Example, group_by: str | None) -> str:
    """Return the text that decides on the split: the field `group_by`, or the example's own key."""
    if group_by is None:
        return example.split_key()
    value = getattr(example, group_by, None)
    if not isinstance(value, str) or not value:
        raise InputError(f"data.group_by: {example.location} has no '{group_by}'; name a field that all examples have")
    return value


def iter_texts(examples: Iterable[Example]) -> Iterator[str]:
    """Yield all texts of the examples, for training a tokenizer."""
    for example in examples:
        yield from example.iter_texts()
