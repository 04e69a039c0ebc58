"""The splits of a seq2seq recipe's pairs: from files, from a folder, or held out from the training files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from qkv.data import formats
from qkv.data.examples import Examples
from qkv.data.pair import Pair, SourceWithReferences, group_by_source
from qkv.data.splitting import split_by_hash, split_by_position
from qkv.errors import InputError
from qkv.recipe.data_options import check_in_files
from qkv.recipe.schema import PairData, PairDataset
from qkv.train.workloads.task_data import with_detected_options

_DATASET_OPTIONS = ("keep_stress", "source_field", "target_field")  # keys of a dataset that are reader options


def read_pair_split(data: PairData, split: str) -> list[Pair]:
    """Read the pairs of "train", "valid" or "test" of all datasets."""
    return [pair for pairs in read_datasets(data, [split])[split].values() for pair in pairs]


def read_datasets(data: PairData, splits: Sequence[str]) -> dict[str, dict[str, Examples[Pair]]]:
    """Read splits, each as pairs by the name of their dataset, with the dataset's prefix before each source.

    Files that several splits share are read once.
    """
    by_dataset = {name: _read_dataset(dataset, splits, name) for name, dataset in data.datasets_by_name.items()}
    return {split: {name: pairs[split] for name, pairs in by_dataset.items()} for split in splits}


def with_detected_format(data: PairData, splits: Mapping[str, Mapping[str, list[Pair]]]) -> PairData:
    """Return the section with the delimiter and encoding that its files were read with, if it leaves them open.

    Those of several datasets are detected again.
    """
    if data.datasets:
        return data
    return with_detected_options(
        data, [pairs for sets in splits.values() for pairs in sets.values() if isinstance(pairs, Examples)]
    )


def reader_notes(splits: Mapping[str, Mapping[str, list[Pair]]]) -> list[str]:
    """Return the notes of the readers, each once."""
    all_pairs = (pairs for sets in splits.values() for pairs in sets.values())
    return list(dict.fromkeys(note for pairs in all_pairs if isinstance(pairs, Examples) for note in pairs.notes))


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


def _read_dataset(dataset: PairDataset, splits: Sequence[str], name: str) -> dict[str, Examples[Pair]]:
    assert dataset.format is not None  # the recipe's schema requires it
    check_in_files(dataset.train)
    format_name = formats.pair_format_name(dataset.format)
    known_options = formats.reader_options(format_name)
    options = {option: getattr(dataset, option) for option in _DATASET_OPTIONS if option in known_options}
    hold_out: dict[str, float] = dict(dataset.hold_out.items())
    examples_by_split = formats.read_splits(
        format_name,
        {"train": dataset.train, "valid": dataset.valid, "test": dataset.test},
        splits,
        held_out=hold_out,
        divide=lambda examples: _divide(examples, dataset, hold_out),
        columns={**options, **dataset.reader_options},
        owner=f"the recipe's dataset '{name}'" if name else "the recipe",
    )
    return {
        split: examples.derive(_add_prefix(_flatten(examples), dataset.prefix))
        for split, examples in examples_by_split.items()
    }


def divide_pairs(data: PairData, examples_by_split: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, list[Pair]]]:
    """Return the splits "train" and "valid" of examples that are not in files, as `read_datasets` does."""
    if len(data.datasets_by_name) != 1:
        raise InputError("data: a recipe of several datasets reads them from files; give a recipe of one dataset")
    ((name, dataset),) = data.datasets_by_name.items()
    splits: dict[str, Sequence[Any]] = dict(examples_by_split)
    if "valid" not in splits:
        splits |= _divide(splits["train"], dataset, dict(dataset.hold_out.items()))
    if not splits.get("valid"):
        raise InputError("data: there is no validation split; give one, or a fraction under data.hold_out")
    return {split: {name: _add_prefix(_flatten(splits[split]), dataset.prefix)} for split in ("train", "valid")}


def _divide(examples: Sequence[Any], dataset: PairDataset, hold_out: dict[str, float]) -> Mapping[str, Sequence[Any]]:
    """Divide the examples of `train`; a split with files of its own takes none of them."""
    if dataset.split_by == "content":
        return split_by_hash(examples, hold_out)
    own_files = {"valid": dataset.valid, "test": dataset.test}
    fractions = {name: fraction for name, fraction in hold_out.items() if own_files[name] is None}
    return split_by_position(examples, fractions)


def _flatten(examples: Iterable[Any]) -> list[Pair]:
    return [pair for example in examples for pair in example.pairs()]
