"""The splits of a fine-tuning recipe's examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from qkv.data import formats
from qkv.data.examples import Example, Examples
from qkv.data.splitting import assign_split, unit_hash
from qkv.errors import InputError
from qkv.recipe.schema import TaskData

SPLITS = ("train", "valid", "test")


def read_split(data: TaskData, split: str) -> Examples[Any]:
    """Read the examples of "train", "valid" or "test"."""
    return read_splits(data, [split])[split]


def read_splits(data: TaskData, splits: Sequence[str]) -> dict[str, Examples[Any]]:
    """Read splits that are in their own files, in a folder, or held out from `train`; each file is read once."""
    return formats.read_splits(
        data.format,
        {"train": data.train, "valid": data.valid, "test": data.test},
        splits,
        held_out={*data.hold_out, *(() if data.fold is None else ("valid",))},
        divide=lambda examples: _divide(examples, data),
        columns=data.columns,
        skip_bad=data.skip_bad,
    )


def _divide(examples: Iterable[Example], data: TaskData) -> dict[str, list[Example]]:
    splits: dict[str, list[Example]] = {name: [] for name in SPLITS}
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
