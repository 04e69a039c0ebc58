"""Random decisions about pieces of text: a function of seed, epoch and the piece's number, and of nothing else.

Each piece has a stream of random words of its own for each use. So what happens to it is new in every epoch, the same
after a resume, and independent of the pieces that share its batch and of the worker that makes it. Words are drawn raw,
because numpy promises the stream of a bit generator for ever but those of its distributions only within a version.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from qkv.errors import InputError

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.floating[Any]]
Words = npt.NDArray[np.uint64]

_PERIOD = 2**128  # of PCG64
_JUMP = 210306068529402873165736369884012333109  # from a piece to the next, as in numpy's `jumped`


class Pieces(NamedTuple):
    """B pieces of text, packed, each with its number in the corpus."""

    ids: Ints  # [T]
    lengths: Ints  # [B] one or more each
    numbers: Ints  # [B]

    @staticmethod
    def of(ids: npt.ArrayLike, lengths: npt.ArrayLike, numbers: npt.ArrayLike) -> Pieces:
        """From arrays, lists or tensors on the host."""
        found = Pieces(*(np.asarray(given, dtype=np.int64) for given in (ids, lengths, numbers)))
        if len(found.lengths) != len(found.numbers):
            raise InputError(f"{len(found.lengths)} pieces and {len(found.numbers)} numbers; give one number a piece")
        if not len(found.lengths) or found.lengths.min() < 1:
            raise InputError("a batch needs at least one piece, and each piece at least one token")
        if found.lengths.sum() != len(found.ids):
            raise InputError(f"{len(found.ids)} tokens cannot be cut into pieces of {found.lengths.sum()} in all")
        if found.numbers.min() < 0:
            raise InputError(f"a piece has the number {found.numbers.min()}; count from 0")
        return found

    @property
    def rows(self) -> Ints:
        """Each token's piece.  # [T]"""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def starts(self) -> Ints:
        """Each piece's first token.  # [B]"""
        return np.cumsum(self.lengths) - self.lengths


class Chance(NamedTuple):
    """What decides, beside a piece's number."""

    seed: int
    epoch: int

    def words(self, numbers: Ints, counts: Ints, use: str) -> Words:
        """`counts[i]` random words of piece `numbers[i]`, one piece after the other.  # [counts.sum()]

        `use` keeps the streams of different decisions apart, and from (seed, epoch), which orders the batches: numpy
        reads that as (seed, epoch, 0). A piece's stream is that of `PCG64.jumped(number)`; it is reached by a jump from
        the piece before, for to seed a generator costs as much as to draw some thousand words.
        """
        if self.seed < 0 or self.epoch < 0:
            raise InputError(f"seed {self.seed}, epoch {self.epoch}; set both to 0 or more")
        stream = np.random.PCG64(np.random.SeedSequence([self.seed, self.epoch, int.from_bytes(use.encode(), "big")]))
        found, place = [], 0
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            stream.advance((number * _JUMP - place) % _PERIOD)
            found.append(stream.random_raw(count))
            place = number * _JUMP + count
        return np.concatenate(found)

    def table(self, numbers: Ints, count: int, use: str) -> Words:
        """`count` random words of each piece, all worked out at once where pieces are many and words few.  # [B, count]

        A word is a piece's number and its own place, mixed with a key of seed, epoch and use (splitmix64, Steele et al.
        2014).
        """
        if self.seed < 0 or self.epoch < 0:
            raise InputError(f"seed {self.seed}, epoch {self.epoch}; set both to 0 or more")
        origin = np.random.SeedSequence([self.seed, self.epoch, int.from_bytes(use.encode(), "big")])
        key = origin.generate_state(1, np.uint64)
        place = numbers.astype(np.uint64)[:, None] * np.uint64(count) + np.arange(count, dtype=np.uint64)
        return _mixed(_mixed(place) ^ key)


def _mixed(words: Words) -> Words:
    """Each word as one that looks random: a step of splitmix64."""
    found = (words + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        found = (found ^ (found >> np.uint64(shift))) * np.uint64(factor)
    return found ^ (found >> np.uint64(31))


def uniform(words: Words) -> Floats:
    """Numbers in [0, 1): the upper 53 bits of each word."""
    return (words >> np.uint64(11)) * 2.0**-53


def poisson(chances: Floats, mean: float) -> Ints:
    """Numbers of a Poisson distribution, by its table of cumulated probabilities."""
    table = [math.exp(-mean)]
    while len(table) < mean or table[-1] > 2.0**-60:
        table.append(table[-1] * mean / len(table))
    return np.searchsorted(np.cumsum(table), chances, side="right").astype(np.int64)


def before(sizes: Ints, rows: Ints) -> Ints:
    """What lies before each item within its row; `rows` rises.  # [N], [N] -> [N]"""
    ends = np.cumsum(sizes)
    new = np.diff(rows, prepend=-1) != 0
    firsts: Ints = (ends - sizes)[new]  # of each row that has items
    found: Ints = ends - sizes - firsts[np.cumsum(new) - 1]
    return found


def drawn(keys: Words, sizes: Ints, rows: Ints, wanted: Ints | Floats, luck: Floats | None = None) -> Bools:
    """Which items are drawn, one after the other in random order, until what each row wants is used up.  # [N]

    The item that the limit falls into is in if the row's luck, a number in [0, 1), is below the part of it that lies
    before the limit. So the sum of the sizes drawn is `wanted` in expectation, and less than an item away from it.
    Without luck, a whole number of items of size one is drawn exactly.
    """
    order = np.lexsort((keys, rows))
    reached = before(sizes[order], rows)  # rows[order] is rows: an item stays in its row
    found = np.empty(len(rows), dtype=np.bool_)
    found[order] = (reached if luck is None else reached + luck[rows] * sizes[order]) < wanted[rows]
    return found
