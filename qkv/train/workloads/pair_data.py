"""The pairs of a recipe, set by set: from their files, from a folder's parts, or held out of the training file."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path

from qkv.data import formats
from qkv.data.formats.pair_readers import FORMATS, read_pairs
from qkv.data.pair import Pair, SourceWithReferences, group_by_source, split_by_hash
from qkv.errors import InputError
from qkv.recipe.schema import PairData, PairDataset

FORMAT_SPLITS = {"valid": "dev"}  # what a format calls a part, where it calls it otherwise


def read_pair_split(data: PairData, split: str) -> list[Pair]:
    """The pairs of `train`, `valid` or `test`, of all sets."""
    return [pair for pairs in read_datasets(data, split).values() for pair in pairs]


def read_datasets(data: PairData, split: str) -> dict[str, list[Pair]]:
    """The same by the name of their set, each source with the set's prefix before it."""
    return {name: _add_prefix(_read_dataset_split(dataset, split, name), dataset.prefix) for name, dataset in data.datasets_by_name.items()}


def to_examples(pairs: list[Pair], by_source: bool) -> list[SourceWithReferences]:
    """Sources with their references: all that a source has anywhere, or those that stand in one place with it."""
    if by_source:
        return group_by_source(pairs)
    examples = []
    for (location, source), group_pairs in groupby(pairs, lambda pair: (pair.location, pair.source)):
        examples.append(SourceWithReferences(source, tuple(dict.fromkeys(pair.target for pair in group_pairs)), location))
    return examples


def _add_prefix(pairs: list[Pair], prefix: str) -> list[Pair]:
    return [replace(pair, source=prefix + pair.source) for pair in pairs] if prefix else pairs


def _read_dataset_split(dataset: PairDataset, split: str, name: str) -> list[Pair]:
    path = getattr(dataset, split)
    if path is not None and not (split == "train" and dataset.hold_out):
        return _read_files(dataset, path, split)
    assert dataset.train is not None  # the section refuses a set without it
    if split == "train" or split in dataset.hold_out:
        return split_by_hash(_read_files(dataset, dataset.train, "train"), dataset.hold_out)[split]
    if dataset.format not in FORMATS and isinstance(dataset.train, str) and Path(dataset.train).is_dir():
        return _read_files(dataset, dataset.train, split)
    description = f"the recipe's set '{name}'" if name else "the recipe"
    raise InputError(f"{description} has no '{split}' data; give data.{split}, or a share under data.hold_out")


def _read_files(dataset: PairDataset, path: str | list[str], split: str) -> list[Pair]:
    files = [path] if isinstance(path, str) else path
    if dataset.format == "aligned":
        if len(files) != 2:
            raise InputError(f"data.format aligned takes two files, [source, target], not {len(files)}")
        return read_pairs("aligned", files[0], target_path=files[1])
    return [pair for file in files for pair in _read_file(dataset, file, split)]


def _read_file(dataset: PairDataset, file: str, split: str) -> list[Pair]:
    assert dataset.format is not None
    if dataset.format in FORMATS:
        fields = {"source_field": dataset.source_field, "target_field": dataset.target_field}
        return read_pairs(dataset.format, file, keep_stress=dataset.keep_stress, **fields)
    examples = formats.read(dataset.format, file, split=FORMAT_SPLITS.get(split, split), columns=dataset.columns)
    return [pair for example in examples for pair in _pairs_of_example(example)]


def _pairs_of_example(example: Pair | SourceWithReferences) -> list[Pair]:
    """One a reference: what a document may be summed up as is learned in all its forms."""
    if isinstance(example, Pair):
        return [example]
    return [Pair(example.source, reference, example.location) for reference in example.references]
