"""Pairs of segments for next-sentence prediction (Devlin et al. 2019, section 3.1 and appendix A.2).

A document is cut into pieces of whole sentences. A piece is split between two of its sentences: what stands before is
the first segment, and half of the time the second one is what really follows, half of the time it begins with a random
sentence of the other documents and has about the same length, so that the length does not give the answer away. What
it took the place of is not seen in that epoch, but in others.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from qkv.data.chance import Bools, Chance, Ints, Pieces, Words
from qkv.data.encoded import Encoded
from qkv.data.pieces import PieceBatch, cut, unit_edges
from qkv.errors import InputError


class _Drawn(NamedTuple):
    """The pairs of an epoch, as places in the corpus."""

    split: Ints  # [N] where the first segment ends
    begin: Ints  # [N] where the second one begins
    end: Ints  # [N]
    follows: Bools  # [N]


class SentencePairs:
    """A source of pieces, each a pair of segments of `longest` tokens together at most.

    Pair `number` of an epoch is a function of the corpus, `longest`, the seed, the epoch and the number. A piece of one
    sentence is split anywhere; one of a single token has nothing that follows it. Where the first sentence of another
    document is longer than there is room, its beginning is taken.
    """

    def __init__(self, corpus: Encoded, longest: int, *, seed: int) -> None:
        if longest < 2:
            raise InputError(f"pairs of segments need 2 tokens or more, not {longest}")
        self.corpus, self.longest, self.seed = corpus, longest, seed
        self._full = np.flatnonzero(corpus.lengths > 0)
        if len(self._full) < 2:
            raise InputError(
                "next-sentence pairs need two documents or more; check how the corpus is cut into documents"
            )
        ends = corpus.sentence_ends
        cuts = cut(corpus.lengths, longest, at="sentences", sentence_ends=ends)
        starts = corpus.starts
        self._edges = unit_edges(ends, longest)
        self._begin, self._end = starts[cuts.document] + cuts.begin, starts[cuts.document] + cuts.end
        self._rank = np.searchsorted(self._full, cuts.document)  # of the piece's document among those with text
        # The units of each document with text, as its first and the one behind its last.
        self._first = np.searchsorted(self._edges, starts[self._full])
        self._last = np.searchsorted(self._edges, starts[self._full] + corpus.lengths[self._full])
        self._drawn = lru_cache(2)(self._draw)  # two: batches are made ahead of time, over the end of an epoch

    def lengths(self, epoch: int) -> Ints:
        drawn = self._drawn(epoch)
        return drawn.split - self._begin + drawn.end - drawn.begin

    def take(self, epoch: int, numbers: Ints) -> PieceBatch:
        drawn = self._drawn(epoch)
        split, begin, end = drawn.split[numbers], drawn.begin[numbers], drawn.end[numbers]
        first = split - self._begin[numbers]
        begins = np.stack([self._begin[numbers], begin], 1).ravel()  # [B * 2] first and second segments by turns
        ends = np.stack([split, end], 1).ravel()
        pieces = Pieces(self.corpus.gather(begins, ends), first + end - begin, numbers)
        return PieceBatch(epoch, pieces, first, drawn.follows[numbers])

    def _draw(self, epoch: int) -> _Drawn:
        count = len(self._begin)
        stream = Chance(self.seed, epoch).words(np.zeros(1, np.int64), np.array([3 * count]), "next")
        words = stream.reshape(count, 3)  # a row a pair, so that a pair depends on its number alone
        split = self._splits(words[:, 0])
        follows = (words[:, 1] >> np.uint64(63) == 1) & (split < self._end)
        begin, end = self._others(split, words[:, 2])
        return _Drawn(split, np.where(follows, split, begin), np.where(follows, self._end, end), follows)

    def _splits(self, words: Words) -> Ints:
        low, high = np.searchsorted(self._edges, self._begin), np.searchsorted(self._edges, self._end)
        between = self._edges[low + 1 + _below(words, np.maximum(high - low - 1, 1))]
        anywhere = self._begin + 1 + _below(words, np.maximum(self._end - self._begin - 1, 1))
        return np.where(high - low > 1, between, np.minimum(anywhere, self._end))

    def _others(self, split: Ints, words: Words) -> tuple[Ints, Ints]:
        """Sentences of another document, as near to the length of what follows `split` as they and the room allow."""
        own, size = self._first[self._rank], (self._last - self._first)[self._rank]
        unit = _below(words, len(self._edges) - 1 - size)
        unit += np.where(unit >= own, size, 0)  # any but those of the piece's own document
        rank = np.searchsorted(self._last, unit, side="right")
        first, last = self._first[rank], self._last[rank]
        wanted = np.maximum(self._end - split, 1)
        # Not so near its document's end that there is too little behind it: that would tell it from what follows.
        latest = np.searchsorted(self._edges, self._edges[last] - wanted, side="right") - 1
        unit = np.minimum(unit, np.maximum(latest, first))
        begin = self._edges[unit]
        goal, room = begin + wanted, begin + self.longest - (split - self._begin)
        above = np.minimum(np.searchsorted(self._edges, goal), last)  # the first edge that is not before the goal
        over, under = self._edges[above], self._edges[np.maximum(above - 1, unit)]
        nearer = np.where((under > begin) & ((goal - under < over - goal) | (over > room)), under, over)
        return begin, np.minimum(nearer, room)


def _below(words: Words, limits: Ints) -> Ints:
    """A number from 0 up to, not including, each limit; of 64 bits, so that the bias is too small to measure."""
    return (words % limits.astype(np.uint64)).astype(np.int64)
