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

from qkv.data.corpora.chunks import ChunkBatch, chunk_documents, sentence_edges
from qkv.data.corpora.tokenized_corpus import TokenizedCorpus
from qkv.data.rng import Bools, CounterRNG, Ints, PackedChunks, RandomBits
from qkv.errors import InputError


class _EpochPairs(NamedTuple):
    """The pairs of an epoch, as places in the corpus."""

    first_end: Ints  # [N] where the first segment ends
    second_start: Ints  # [N] where the second one begins
    second_end: Ints  # [N]
    is_next: Bools  # [N]


class NextSentencePairs:
    """A source of pieces, each a pair of segments of `max_length` tokens together at most.

    Pair `number` of an epoch is a function of the corpus, `max_length`, the seed, the epoch and the number. A piece of one
    sentence is split anywhere; one of a single token has nothing that follows it. Where the first sentence of another
    document is longer than there is room, its beginning is taken.
    """

    def __init__(self, corpus: TokenizedCorpus, max_length: int, *, seed: int) -> None:
        if max_length < 2:
            raise InputError(f"pairs of segments need 2 tokens or more, not {max_length}")
        self.corpus, self.max_length, self.seed = corpus, max_length, seed
        self._nonempty_documents = np.flatnonzero(corpus.lengths > 0)
        if len(self._nonempty_documents) < 2:
            raise InputError(
                "next-sentence pairs need two documents or more; check how the corpus is cut into documents"
            )
        ends = corpus.sentence_ends
        chunks = chunk_documents(corpus.lengths, max_length, strategy="sentences", sentence_ends=ends)
        starts = corpus.document_starts
        self._sentence_edges = sentence_edges(ends, max_length)
        self._chunk_starts, self._chunk_ends = starts[chunks.document] + chunks.start, starts[chunks.document] + chunks.end
        self._document_ranks = np.searchsorted(self._nonempty_documents, chunks.document)  # of the piece's document among those with text
        # The units of each document with text, as its first and the one behind its last.
        self._first_sentences = np.searchsorted(self._sentence_edges, starts[self._nonempty_documents])
        self._last_sentences = np.searchsorted(self._sentence_edges, starts[self._nonempty_documents] + corpus.lengths[self._nonempty_documents])
        self._cached_pairs = lru_cache(2)(self._sample_pairs)  # two: batches are made ahead of time, over the end of an epoch

    def lengths(self, epoch: int) -> Ints:
        pairs = self._cached_pairs(epoch)
        return pairs.first_end - self._chunk_starts + pairs.second_end - pairs.second_start

    def gather(self, epoch: int, indices: Ints) -> ChunkBatch:
        pairs = self._cached_pairs(epoch)
        first_end, second_start, second_end = pairs.first_end[indices], pairs.second_start[indices], pairs.second_end[indices]
        first_lengths = first_end - self._chunk_starts[indices]
        begins = np.stack([self._chunk_starts[indices], second_start], 1).ravel()  # [B * 2] first and second segments by turns
        ends = np.stack([first_end, second_end], 1).ravel()
        chunks = PackedChunks(self.corpus.gather_spans(begins, ends), first_lengths + second_end - second_start, indices)
        return ChunkBatch(epoch, chunks, first_lengths, pairs.is_next[indices])

    def _sample_pairs(self, epoch: int) -> _EpochPairs:
        count = len(self._chunk_starts)
        flat_bits = CounterRNG(self.seed, epoch).random_bits(np.zeros(1, np.int64), np.array([3 * count]), "next")
        bits = flat_bits.reshape(count, 3)  # a row a pair, so that a pair depends on its number alone
        first_end = self._sample_splits(bits[:, 0])
        is_next = (bits[:, 1] >> np.uint64(63) == 1) & (first_end < self._chunk_ends)
        second_start, second_end = self._sample_continuations(first_end, bits[:, 2])
        return _EpochPairs(first_end, np.where(is_next, first_end, second_start), np.where(is_next, self._chunk_ends, second_end), is_next)

    def _sample_splits(self, bits: RandomBits) -> Ints:
        low, high = np.searchsorted(self._sentence_edges, self._chunk_starts), np.searchsorted(self._sentence_edges, self._chunk_ends)
        between = self._sentence_edges[low + 1 + _random_below(bits, np.maximum(high - low - 1, 1))]
        anywhere = self._chunk_starts + 1 + _random_below(bits, np.maximum(self._chunk_ends - self._chunk_starts - 1, 1))
        return np.where(high - low > 1, between, np.minimum(anywhere, self._chunk_ends))

    def _sample_continuations(self, first_end: Ints, bits: RandomBits) -> tuple[Ints, Ints]:
        """Sentences of another document, as near to the length of what follows `first_end` as they and the room allow."""
        document_first, document_size = self._first_sentences[self._document_ranks], (self._last_sentences - self._first_sentences)[self._document_ranks]
        sentence = _random_below(bits, len(self._sentence_edges) - 1 - document_size)
        sentence += np.where(sentence >= document_first, document_size, 0)  # any but those of the piece's own document
        rank = np.searchsorted(self._last_sentences, sentence, side="right")
        first, last = self._first_sentences[rank], self._last_sentences[rank]
        target_length = np.maximum(self._chunk_ends - first_end, 1)
        # Not so near its document's end that there is too little behind it: that would tell it from what follows.
        latest = np.searchsorted(self._sentence_edges, self._sentence_edges[last] - target_length, side="right") - 1
        sentence = np.minimum(sentence, np.maximum(latest, first))
        start = self._sentence_edges[sentence]
        target_end, max_end = start + target_length, start + self.max_length - (first_end - self._chunk_starts)
        next_edge = np.minimum(np.searchsorted(self._sentence_edges, target_end), last)  # the first edge that is not before the goal
        end_above, end_below = self._sentence_edges[next_edge], self._sentence_edges[np.maximum(next_edge - 1, sentence)]
        nearest_end = np.where((end_below > start) & ((target_end - end_below < end_above - target_end) | (end_above > max_end)), end_below, end_above)
        return start, np.minimum(nearest_end, max_end)


def _random_below(bits: RandomBits, limits: Ints) -> Ints:
    """A number from 0 up to, not including, each limit; of 64 bits, so that the bias is too small to measure."""
    return (bits % limits.astype(np.uint64)).astype(np.int64)
