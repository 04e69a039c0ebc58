"""Source and target as text: one pair a line of a file, pairs held out by hash, variants of a source grouped."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from qkv.errors import InputError

REST = "train"


@dataclass(frozen=True, slots=True)
class Pair:
    """One source with one of its targets, and the place ("file:line") that they came from."""

    source: str
    target: str
    where: str


@dataclass(frozen=True, slots=True)
class Example:
    """One source with all the targets that count as right; `where` is the place of the first."""

    source: str
    references: tuple[str, ...]
    where: str


def group(pairs: Iterable[Pair]) -> list[Example]:
    """Gather the targets of each source; sources and targets in first-seen order, equal targets once."""
    targets: dict[str, dict[str, None]] = {}  # inner dict: a set that keeps its order
    places: dict[str, str] = {}
    for pair in pairs:
        targets.setdefault(pair.source, {})[pair.target] = None
        places.setdefault(pair.source, pair.where)
    return [Example(source, tuple(found), places[source]) for source, found in targets.items()]


def hold_out(pairs: Iterable[Pair], shares: Mapping[str, float], salt: str = "") -> dict[str, list[Pair]]:
    """Split into the parts named in `shares` and "train" for the rest, by a hash of the source.

    A source falls in the same part whatever else the data holds and in whatever order, so all its variants stay
    together, and new lines never move old ones between train and test. Shares are met in expectation, not exactly.
    """
    _check_shares(shares)
    ceilings: list[tuple[float, str]] = []
    total = 0.0
    for name in sorted(shares):  # sorted: a config that comes back with its keys in another order splits the same
        total += shares[name]
        ceilings.append((total, name))
    parts: dict[str, list[Pair]] = {name: [] for name in [*shares, REST]}
    for pair in pairs:
        place = unit_hash(pair.source, salt)
        parts[next((name for ceiling, name in ceilings if place < ceiling), REST)].append(pair)
    return parts


def _check_shares(shares: Mapping[str, float]) -> None:
    if REST in shares:
        raise InputError(f"hold_out: '{REST}' is the name of the rest; leave it out of the shares")
    for name, share in shares.items():
        if not 0 < share < 1:
            raise InputError(f"hold_out: the share of '{name}' is {share}; set it between 0 and 1")
    total = sum(shares.values())
    if total >= 1:
        raise InputError(f"hold_out: the shares sum to {total:g} and leave nothing for '{REST}'; keep the sum below 1")


def unit_hash(source: str, salt: str = "") -> float:
    """A number in [0, 1) that depends on nothing but `source` and `salt`."""
    digest = hashlib.blake2b(f"{salt}\0{source}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48  # 48 bits: exact in a float, hence never rounded up to 1
