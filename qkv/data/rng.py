"""Counter-based random numbers: a function of seed, epoch, use and the index of a chunk or image only.

Each chunk has a random stream of its own for each use. So its noise is new in every epoch, the same after a resume, and
independent of the other chunks of its batch and of the worker. Raw bits are used, because numpy guarantees the stream
of a bit generator across versions, but not those of its distributions.
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

_PCG64_PERIOD = 2**128
_PCG64_JUMP = (
    210306068529402873165736369884012333109  # distance between the streams of two chunks, as in numpy's `jumped`
)


class PackedChunks(NamedTuple):
    """B chunks of text, concatenated, with the index of each in the corpus."""

    ids: Ints  # [T]
    lengths: Ints  # [B] at least 1
    indices: Ints  # [B]

    @staticmethod
    def from_arrays(ids: npt.ArrayLike, lengths: npt.ArrayLike, indices: npt.ArrayLike) -> PackedChunks:
        """Check and convert arrays, lists or CPU tensors."""
        chunks = PackedChunks(*(np.asarray(values, dtype=np.int64) for values in (ids, lengths, indices)))
        if len(chunks.lengths) != len(chunks.indices):
            raise InputError(
                f"{len(chunks.lengths)} chunks and {len(chunks.indices)} indices; give one index per chunk"
            )
        if not len(chunks.lengths) or chunks.lengths.min() < 1:
            raise InputError("a batch needs at least one chunk, and each chunk at least one token")
        if chunks.lengths.sum() != len(chunks.ids):
            raise InputError(f"the lengths sum to {chunks.lengths.sum()}, but there are {len(chunks.ids)} tokens")
        if chunks.indices.min() < 0:
            raise InputError(f"a chunk has the index {chunks.indices.min()}; count from 0")
        return chunks

    @property
    def row_ids(self) -> Ints:
        """The chunk of each token.  # [T]"""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def starts(self) -> Ints:
        """The first token of each chunk.  # [B]"""
        return np.cumsum(self.lengths) - self.lengths


class CounterRNG(NamedTuple):
    """Random numbers for chunks, given by seed and epoch."""

    seed: int
    epoch: int

    def random_bits(self, indices: Ints, counts: Ints, stream_name: str) -> RandomBits:
        """Return `counts[i]` random 64-bit words for chunk `indices[i]`, concatenated.  # [counts.sum()]

        `stream_name` separates the streams of different uses, also from (seed, epoch), which orders the batches and
        which numpy reads as (seed, epoch, 0). The stream of a chunk is that of `PCG64.jumped(index)`. It is reached by
        advancing from the previous chunk, because seeding a generator costs as much as drawing thousands of words.
        """
        bit_generator = np.random.PCG64(self._seed_sequence(stream_name))
        bits, position = [], 0
        for index, count in zip(indices.tolist(), counts.tolist(), strict=True):
            bit_generator.advance((index * _PCG64_JUMP - position) % _PCG64_PERIOD)
            bits.append(bit_generator.random_raw(count))
            position = index * _PCG64_JUMP + count
        return np.concatenate(bits)

    def random_bits_table(self, indices: Ints, count: int, stream_name: str) -> RandomBits:
        """Return `count` random 64-bit words for each index; vectorized, for many indices and few words.  # [B, count]

        A word is a hash of the index and the number of the word, with a key made of seed, epoch and use (splitmix64,
        Steele et al. 2014).
        """
        key = self._seed_sequence(stream_name).generate_state(1, np.uint64).astype(np.uint64, copy=False)
        rows: RandomBits = indices.astype(np.uint64)[:, None]
        counters = np.add(rows * np.uint64(count), np.arange(count, dtype=np.uint64), dtype=np.uint64)
        return _splitmix64(_splitmix64(counters) ^ key)

    def _seed_sequence(self, stream_name: str) -> np.random.SeedSequence:
        if self.seed < 0 or self.epoch < 0:
            raise InputError(f"seed {self.seed}, epoch {self.epoch}; set both to 0 or more")
        return np.random.SeedSequence([self.seed, self.epoch, int.from_bytes(stream_name.encode(), "big")])


def _splitmix64(bits: RandomBits) -> RandomBits:
    """Hash each word: one step of splitmix64."""
    mixed = (bits + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def uniform(bits: RandomBits) -> Floats:
    """Return numbers in [0, 1) made of the upper 53 bits of each word."""
    return (bits >> np.uint64(11)) * 2.0**-53


def poisson(uniforms: Floats, mean: float) -> Ints:
    """Map uniform numbers to a Poisson distribution, by the inverse of its cumulative distribution."""
    pmf = [math.exp(-mean)]
    while len(pmf) < mean or pmf[-1] > 2.0**-60:
        pmf.append(pmf[-1] * mean / len(pmf))
    return np.searchsorted(np.cumsum(pmf), uniforms, side="right").astype(np.int64)


def cumsum_within_rows(values: Ints, rows: Ints) -> Ints:
    """Return the sum of the values before each item in its row; `rows` is sorted.  # [N], [N] -> [N]"""
    ends = np.cumsum(values)
    is_row_start = np.diff(rows, prepend=-1) != 0
    row_offsets: Ints = (ends - values)[is_row_start]  # of each nonempty row
    offsets: Ints = ends - values - row_offsets[np.cumsum(is_row_start) - 1]
    return offsets


def sample_until(
    keys: RandomBits, item_sizes: Ints, rows: Ints, target_sizes: Ints | Floats, rounding_draw: Floats | None = None
) -> Bools:
    """Draw items of each row in random order until their sizes reach the row's target; return a mask.  # [N]

    The item that crosses the target is included if `rounding_draw` of the row, a number in [0, 1), is below the
    fraction of the item before the target. So the expected total is exactly `target_sizes`. Without `rounding_draw`,
    items of size 1 and integer targets give exact counts.
    """
    order = np.lexsort((keys, rows))
    cumulative = cumsum_within_rows(item_sizes[order], rows)  # rows[order] equals rows, because items stay in their row
    is_selected = np.empty(len(rows), dtype=np.bool_)
    thresholds = cumulative if rounding_draw is None else cumulative + rounding_draw[rows] * item_sizes[order]
    is_selected[order] = thresholds < target_sizes[rows]
    return is_selected
