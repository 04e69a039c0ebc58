"""Assignment of examples to splits by a hash of their content, or by their position.

A key falls in the same split regardless of the other examples and of their order, so adding examples to a file never
moves existing ones between train and test.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence

from qkv.data.examples import ExampleT
from qkv.errors import InputError

TRAIN = "train"


def unit_hash(key: str, salt: str = "") -> float:
    """Return a number in [0, 1) that depends only on `key` and `salt`."""
    digest = hashlib.blake2b(f"{salt}\0{key}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48  # 48 bits are exact in a float, so this is never rounded up to 1


def assign_split(key: str, fractions: Mapping[str, float], salt: str = "", exclude: Collection[str] = ()) -> str:
    """Return the split of a key: one of the names in `fractions`, or "train" for the rest.

    A split in `exclude` gets no examples; those that it would have had go to the next split in alphabetical order.
    """
    hash_value, upper = unit_hash(key, salt), 0.0
    for name in sorted(fractions):  # sorted, so that the order of a recipe's keys does not matter
        upper += fractions[name]
        if hash_value < upper and name not in exclude:
            return name
    return TRAIN


def split_by_hash(
    examples: Iterable[ExampleT], fractions: Mapping[str, float], salt: str = ""
) -> dict[str, list[ExampleT]]:
    """Divide examples into the splits of `fractions`, and "train" for the rest, by a hash of their split key.

    Examples with the same key stay together. Fractions are met in expectation, not exactly.
    """
    _check_fractions(fractions)
    splits: dict[str, list[ExampleT]] = {name: [] for name in [*fractions, TRAIN]}
    for example in examples:
        splits[assign_split(example.split_key(), fractions, salt)].append(example)
    return splits


def split_by_position(examples: Sequence[ExampleT], fractions: Mapping[str, float]) -> dict[str, list[ExampleT]]:
    """Divide examples in their order: "train" first, then the splits of `fractions`, valid before test."""
    _check_fractions(fractions)
    order = [name for name in ("valid", "test") if name in fractions]
    sizes = [round(fractions[name] * len(examples)) for name in order]
    start = len(examples) - sum(sizes)
    splits = {TRAIN: list(examples[:start])}
    for name, size in zip(order, sizes, strict=True):
        splits[name] = list(examples[start : start + size])
        start += size
    return splits


def _check_fractions(fractions: Mapping[str, float]) -> None:
    if TRAIN in fractions:
        raise InputError(f"hold_out: '{TRAIN}' is the name of the remaining examples; leave it out")
    for name, fraction in fractions.items():
        if not 0 < fraction < 1:
            raise InputError(f"hold_out: the fraction of '{name}' is {fraction}; set it between 0 and 1")
    total = sum(fractions.values())
    if total >= 1:
        raise InputError(f"hold_out: the fractions sum to {total:g} and leave nothing for '{TRAIN}'; lower them")
