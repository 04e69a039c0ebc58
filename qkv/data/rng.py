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
RandomBits = npt.NDArray[np.uint64]

_PCG64_PERIOD = 2**128  # of PCG64
_PCG64_JUMP = 210306068529402873165736369884012333109  # from a piece to the next, as in numpy's `jumped`


class PackedChunks(NamedTuple):
    """B pieces of text, packed, each with its number in the corpus."""

    ids: Ints  # [T]
    lengths: Ints  # [B] one or more each
    indices: Ints  # [B]

    @staticmethod
    def from_arrays(ids: npt.ArrayLike, lengths: npt.ArrayLike, indices: npt.ArrayLike) -> PackedChunks:
        """From arrays, lists or tensors on the host."""
        chunks = PackedChunks(*(np.asarray(values, dtype=np.int64) for values in (ids, lengths, indices)))
        if len(chunks.lengths) != len(chunks.indices):
            raise InputError(f"{len(chunks.lengths)} pieces and {len(chunks.indices)} numbers; give one number a piece")
        if not len(chunks.lengths) or chunks.lengths.min() < 1:
            raise InputError("a batch needs at least one piece, and each piece at least one token")
        if chunks.lengths.sum() != len(chunks.ids):
            raise InputError(f"{len(chunks.ids)} tokens cannot be cut into pieces of {chunks.lengths.sum()} in all")
        if chunks.indices.min() < 0:
            raise InputError(f"a piece has the number {chunks.indices.min()}; count from 0")
        return chunks

    @property
    def row_ids(self) -> Ints:
        """Each token's piece.  # [T]"""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def starts(self) -> Ints:
        """Each piece's first token.  # [B]"""
        return np.cumsum(self.lengths) - self.lengths


class CounterRNG(NamedTuple):
    """What decides, beside a piece's number."""

    seed: int
    epoch: int

    def random_bits(self, indices: Ints, counts: Ints, stream_name: str) -> RandomBits:
        """`counts[i]` random words of piece `indices[i]`, one piece after the other.  # [counts.sum()]

        `stream_name` keeps the streams of different decisions apart, and from (seed, epoch), which orders the batches: numpy
        reads that as (seed, epoch, 0). A piece's stream is that of `PCG64.jumped(number)`; it is reached by a jump from
        the piece before, for to seed a generator costs as much as to draw some thousand words.
        """
        if self.seed < 0 or self.epoch < 0:
            raise InputError(f"seed {self.seed}, epoch {self.epoch}; set both to 0 or more")
        bit_generator = np.random.PCG64(np.random.SeedSequence([self.seed, self.epoch, int.from_bytes(stream_name.encode(), "big")]))
        bits, position = [], 0
        for index, count in zip(indices.tolist(), counts.tolist(), strict=True):
            bit_generator.advance((index * _PCG64_JUMP - position) % _PCG64_PERIOD)
            bits.append(bit_generator.random_raw(count))
            position = index * _PCG64_JUMP + count
        return np.concatenate(bits)

    def random_bits_table(self, indices: Ints, count: int, stream_name: str) -> RandomBits:
        """`count` random words of each piece, all worked out at once where pieces are many and words few.  # [B, count]

        A word is a piece's number and its own place, mixed with a key of seed, epoch and use (splitmix64, Steele et al.
        2014).
        """
        if self.seed < 0 or self.epoch < 0:
            raise InputError(f"seed {self.seed}, epoch {self.epoch}; set both to 0 or more")
        seed_sequence = np.random.SeedSequence([self.seed, self.epoch, int.from_bytes(stream_name.encode(), "big")])
        key = seed_sequence.generate_state(1, np.uint64)
        counters = indices.astype(np.uint64)[:, None] * np.uint64(count) + np.arange(count, dtype=np.uint64)
        return _splitmix64(_splitmix64(counters) ^ key)


def _splitmix64(bits: RandomBits) -> RandomBits:
    """Each word as one that looks random: a step of splitmix64."""
    mixed = (bits + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def uniform(bits: RandomBits) -> Floats:
    """Numbers in [0, 1): the upper 53 bits of each word."""
    return (bits >> np.uint64(11)) * 2.0**-53


def poisson(uniforms: Floats, mean: float) -> Ints:
    """Numbers of a Poisson distribution, by its table of cumulated probabilities."""
    pmf = [math.exp(-mean)]
    while len(pmf) < mean or pmf[-1] > 2.0**-60:
        pmf.append(pmf[-1] * mean / len(pmf))
    return np.searchsorted(np.cumsum(pmf), uniforms, side="right").astype(np.int64)


def cumsum_within_rows(values: Ints, rows: Ints) -> Ints:
    """What lies before each item within its row; `rows` rises.  # [N], [N] -> [N]"""
    ends = np.cumsum(values)
    is_row_start = np.diff(rows, prepend=-1) != 0
    row_offsets: Ints = (ends - values)[is_row_start]  # of each row that has items
    offsets: Ints = ends - values - row_offsets[np.cumsum(is_row_start) - 1]
    return offsets


def sample_until(keys: RandomBits, item_sizes: Ints, rows: Ints, target_sizes: Ints | Floats, rounding_draw: Floats | None = None) -> Bools:
    """Which items are drawn, one after the other in random order, until what each row wants is used up.  # [N]

    The item that the limit falls into is in if the row's luck, a number in [0, 1), is below the part of it that lies
    before the limit. So the sum of the sizes drawn is `target_sizes` in expectation, and less than an item away from it.
    Without luck, a whole number of items of size one is drawn exactly.
    """
    order = np.lexsort((keys, rows))
    cumulative = cumsum_within_rows(item_sizes[order], rows)  # rows[order] is rows: an item stays in its row
    is_selected = np.empty(len(rows), dtype=np.bool_)
    is_selected[order] = (cumulative if rounding_draw is None else cumulative + rounding_draw[rows] * item_sizes[order]) < target_sizes[rows]
    return is_selected
