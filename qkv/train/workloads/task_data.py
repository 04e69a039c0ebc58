"""The examples of a task's recipe: its parts, and which part an example belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from qkv.data.examples import Examples, MultipleChoiceExample, QAExample, TaggedExample, TextExample
from qkv.data.formats import has_splits, read
from qkv.data.pair import unit_hash
from qkv.errors import InputError
from qkv.recipe.schema import TaskData

FORMAT_SPLITS = {"valid": "dev"}  # what a format calls a part, where it calls it otherwise


def read_split(data: TaskData, split: str) -> Examples[Any]:
    """The examples of `train`, `valid` or `test`: of their own file, of a folder's own part, or held out of `train`."""
    path = getattr(data, split)
    is_held_out = path is None and (split in data.hold_out or (split == "valid" and data.fold is not None))
    paths = data.train if path is None else path
    files = paths if isinstance(paths, list) else [paths]
    if path is None and not is_held_out and not all(has_splits(data.format, file) for file in files):
        raise InputError(f"the recipe has no '{split}' data; give data.{split}, or a share under data.hold_out")
    examples: Examples[Any] = Examples()
    for file in files:
        format_split = "train" if is_held_out else FORMAT_SPLITS.get(split, split)  # of a folder; a file is taken whole
        file_examples = read(data.format, file, split=format_split, columns=data.columns, skip_bad=data.skip_bad)
        examples.extend(file_examples)
        examples.skipped += file_examples.skipped
    if is_held_out or (split == "train" and (data.hold_out or data.fold)):
        return Examples([example for example in examples if _split_of(example, data) == split], examples.skipped)
    return examples


def _split_of(example: Any, data: TaskData) -> str:
    """By a hash of what it says, so that new lines never move old ones."""
    key = _split_key(example, data.group_by)
    hash_value, threshold = unit_hash(key), 0.0
    for name in sorted(data.hold_out):
        threshold += data.hold_out[name]
        if hash_value < threshold and getattr(data, name) is None:
            return name
    if data.fold is not None and _fold_of_key(key, data.fold[1]) == data.fold[0]:
        return "valid"
    return "train"


def fold_of(example: Any, group_by: str | None, count: int) -> int:
    """Which of so many parts an example is held out in, from 1."""
    return _fold_of_key(_split_key(example, group_by), count)


def _fold_of_key(key: str, count: int) -> int:
    return int(unit_hash(key, "fold") * count) + 1


def _split_key(example: Any, group_by: str | None) -> str:
    """What decides on an example's part: the field that is named, of a question its context, else all that it says."""
    if group_by is not None:
        value = getattr(example, group_by, None)
        if not isinstance(value, str) or not value:
            raise InputError(f"data.group_by: {example.location} has no '{group_by}'; name what all examples have")
        return value
    # Pairs have none: no task takes them, and the one that is asked to says so.
    return str(example.split_key()) if hasattr(example, "split_key") else repr(example)


def iter_texts(examples: Iterable[Any]) -> Iterator[str]:
    """All that examples say, for a tokeniser to be trained on."""
    for example in examples:
        if isinstance(example, TextExample):
            yield from (text for text in (example.text, example.text_pair) if text is not None)
        elif isinstance(example, TaggedExample):
            yield example.text
        elif isinstance(example, QAExample):
            yield from (example.question, example.context)
        elif isinstance(example, MultipleChoiceExample):
            yield from (text for text in (example.context, example.text_pair, *example.choices) if text is not None)
