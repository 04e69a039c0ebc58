"""The splits of a seq2seq recipe's pairs: from files, from a folder, or held out from the training files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from qkv.data import formats
from qkv.data.pair import Pair, SourceWithReferences, group_by_source
from qkv.data.splitting import split_by_hash
from qkv.recipe.schema import PairData, PairDataset

_DATASET_OPTIONS = ("keep_stress", "source_field", "target_field")  # keys of a dataset that are reader options


def read_pair_split(data: PairData, split: str) -> list[Pair]:
    """Read the pairs of "train", "valid" or "test" of all datasets."""
    return [pair for pairs in read_datasets(data, [split])[split].values() for pair in pairs]


def read_datasets(data: PairData, splits: Sequence[str]) -> dict[str, dict[str, list[Pair]]]:
    """Read splits, each as pairs by the name of their dataset, with the dataset's prefix before each source.

    Files that several splits share are read once.
    """
    by_dataset = {name: _read_dataset(dataset, splits, name) for name, dataset in data.datasets_by_name.items()}
    return {split: {name: pairs[split] for name, pairs in by_dataset.items()} for split in splits}


def to_examples(pairs: list[Pair], by_source: bool) -> list[SourceWithReferences]:
    """Group pairs into sources with references: all references of equal sources, or only those of one location."""
    if by_source:
        return group_by_source(pairs)
    examples = []
    for (location, source), group_pairs in groupby(pairs, lambda pair: (pair.location, pair.source)):
        references = tuple(dict.fromkeys(pair.target for pair in group_pairs))
        examples.append(SourceWithReferences(source, references, location))
    return examples


def _add_prefix(pairs: list[Pair], prefix: str) -> list[Pair]:
    return [replace(pair, source=prefix + pair.source) for pair in pairs] if prefix else pairs


def _read_dataset(dataset: PairDataset, splits: Sequence[str], name: str) -> dict[str, list[Pair]]:
    assert dataset.format is not None  # the recipe's schema requires it
    format_name = formats.pair_format_name(dataset.format)
    known_options = formats.reader_options(format_name)
    options = {option: getattr(dataset, option) for option in _DATASET_OPTIONS if option in known_options}
    hold_out: dict[str, float] = dict(dataset.hold_out.items())
    examples_by_split = formats.read_splits(
        format_name,
        {"train": dataset.train, "valid": dataset.valid, "test": dataset.test},
        splits,
        held_out=hold_out,
        divide=lambda examples: split_by_hash(examples, hold_out),
        columns={**options, **dataset.columns},
        owner=f"the recipe's dataset '{name}'" if name else "the recipe",
    )
    return {split: _add_prefix(_flatten(examples), dataset.prefix) for split, examples in examples_by_split.items()}


def _flatten(examples: Iterable[Any]) -> list[Pair]:
    return [pair for example in examples for pair in example.pairs()]
