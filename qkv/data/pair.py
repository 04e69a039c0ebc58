"""Source and target as text: one pair a line of a file, pairs held out by hash, variants of a source grouped."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from qkv.errors import InputError

TRAIN = "train"


@dataclass(frozen=True, slots=True)
class Pair:
    """One source with one of its targets, and the place ("file:line") that they came from."""

    source: str
    target: str
    location: str


@dataclass(frozen=True, slots=True)
class SourceWithReferences:
    """One source with all the targets that count as right; `location` is the place of the first."""

    source: str
    references: tuple[str, ...]
    location: str


def group_by_source(pairs: Iterable[Pair]) -> list[SourceWithReferences]:
    """Gather the targets of each source; sources and targets in first-seen order, equal targets once."""
    targets: dict[str, dict[str, None]] = {}  # inner dict: a set that keeps its order
    locations: dict[str, str] = {}
    for pair in pairs:
        targets.setdefault(pair.source, {})[pair.target] = None
        locations.setdefault(pair.source, pair.location)
    return [SourceWithReferences(source, tuple(references), locations[source]) for source, references in targets.items()]


def split_by_hash(pairs: Iterable[Pair], fractions: Mapping[str, float], salt: str = "") -> dict[str, list[Pair]]:
    """Split into the parts named in `fractions` and "train" for the rest, by a hash of the source.

    A source falls in the same part whatever else the data holds and in whatever order, so all its variants stay
    together, and new lines never move old ones between train and test. Shares are met in expectation, not exactly.
    """
    _check_fractions(fractions)
    ceilings: list[tuple[float, str]] = []
    total = 0.0
    for name in sorted(fractions):  # sorted: a config that comes back with its keys in another order splits the same
        total += fractions[name]
        ceilings.append((total, name))
    splits: dict[str, list[Pair]] = {name: [] for name in [*fractions, TRAIN]}
    for pair in pairs:
        hash_value = unit_hash(pair.source, salt)
        splits[next((name for ceiling, name in ceilings if hash_value < ceiling), TRAIN)].append(pair)
    return splits


def _check_fractions(fractions: Mapping[str, float]) -> None:
    if TRAIN in fractions:
        raise InputError(f"hold_out: '{TRAIN}' is the name of the rest; leave it out of the shares")
    for name, fraction in fractions.items():
        if not 0 < fraction < 1:
            raise InputError(f"hold_out: the share of '{name}' is {fraction}; set it between 0 and 1")
    total = sum(fractions.values())
    if total >= 1:
        raise InputError(f"hold_out: the shares sum to {total:g} and leave nothing for '{TRAIN}'; keep the sum below 1")


def unit_hash(source: str, salt: str = "") -> float:
    """A number in [0, 1) that depends on nothing but `source` and `salt`."""
    digest = hashlib.blake2b(f"{salt}\0{source}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48  # 48 bits: exact in a float, hence never rounded up to 1
