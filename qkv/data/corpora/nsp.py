"""Pairs of segments for next-sentence prediction (Devlin et al. 2019, section 3.1 and appendix A.2).

A document is split into chunks of whole sentences, and a chunk between two of its sentences. The text before the split
is the first segment. The second segment is, with probability 1/2, the rest of the chunk, or text of about the same
length that begins at a random sentence of another document; similar lengths prevent the model from recognizing it by
its length. The text it replaces is skipped in this epoch.
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
    """The pairs of an epoch, as token positions in the corpus."""

    first_end: Ints  # [N] end of the first segment
    second_start: Ints  # [N] start of the second segment
    second_end: Ints  # [N] end of the second segment
    is_next: Bools  # [N]


class NextSentencePairs:
    """Chunks that are pairs of segments, of at most `max_length` tokens together (a `ChunkSource`).

    A pair depends on the corpus, `max_length`, seed, epoch and its index only. A chunk of one sentence is split at any
    token; one of a single token always gets a random second segment. A random sentence that is too long is truncated.
    """

    def __init__(self, corpus: TokenizedCorpus, max_length: int, *, seed: int) -> None:
        if max_length < 2:
            raise InputError(f"next-sentence pairs need max_length of 2 or more, not {max_length}")
        self.corpus, self.max_length, self.seed = corpus, max_length, seed
        self._nonempty_documents = np.flatnonzero(corpus.lengths > 0)
        if len(self._nonempty_documents) < 2:
            raise InputError("next-sentence pairs need two documents or more; check the corpus format")
        ends = corpus.sentence_ends
        chunks = chunk_documents(corpus.lengths, max_length, strategy="sentences", sentence_ends=ends)
        starts = corpus.document_starts
        self._sentence_edges = sentence_edges(ends, max_length)
        self._chunk_starts = starts[chunks.document] + chunks.start
        self._chunk_ends = starts[chunks.document] + chunks.end
        # rank of each chunk's document among the nonempty ones
        self._document_ranks = np.searchsorted(self._nonempty_documents, chunks.document)
        # sentences [first, last) of each nonempty document
        document_starts = starts[self._nonempty_documents]
        document_ends = document_starts + corpus.lengths[self._nonempty_documents]
        self._first_sentences = np.searchsorted(self._sentence_edges, document_starts)
        self._last_sentences = np.searchsorted(self._sentence_edges, document_ends)
        # two epochs: at the end of an epoch, batches of the next one are prefetched
        self._cached_pairs = lru_cache(2)(self._sample_pairs)

    def lengths(self, epoch: int) -> Ints:
        """Return the number of tokens of each pair [N]."""
        pairs = self._cached_pairs(epoch)
        return pairs.first_end - self._chunk_starts + pairs.second_end - pairs.second_start

    def gather(self, epoch: int, indices: Ints) -> ChunkBatch:
        """Return the pairs of the given indices, in that order."""
        pairs = self._cached_pairs(epoch)
        first_end, second_end = pairs.first_end[indices], pairs.second_end[indices]
        second_start = pairs.second_start[indices]
        first_lengths = first_end - self._chunk_starts[indices]
        # [B * 2] first and second segments alternate
        begins = np.stack([self._chunk_starts[indices], second_start], 1).ravel()
        ends = np.stack([first_end, second_end], 1).ravel()
        lengths = first_lengths + second_end - second_start
        chunks = PackedChunks(self.corpus.gather_spans(begins, ends), lengths, indices)
        return ChunkBatch(epoch, chunks, first_lengths, pairs.is_next[indices])

    def _sample_pairs(self, epoch: int) -> _EpochPairs:
        count = len(self._chunk_starts)
        flat_bits = CounterRNG(self.seed, epoch).random_bits(np.zeros(1, np.int64), np.array([3 * count]), "next")
        bits = flat_bits.reshape(count, 3)  # one row per pair, so that a pair depends on its index only
        first_end = self._sample_splits(bits[:, 0])
        is_next = (bits[:, 1] >> np.uint64(63) == 1) & (first_end < self._chunk_ends)
        second_start, second_end = self._sample_continuations(first_end, bits[:, 2])
        return _EpochPairs(
            first_end,
            np.where(is_next, first_end, second_start),
            np.where(is_next, self._chunk_ends, second_end),
            is_next,
        )

    def _sample_splits(self, bits: RandomBits) -> Ints:
        low = np.searchsorted(self._sentence_edges, self._chunk_starts)
        high = np.searchsorted(self._sentence_edges, self._chunk_ends)
        between = self._sentence_edges[low + 1 + _random_below(bits, np.maximum(high - low - 1, 1))]
        chunk_lengths = self._chunk_ends - self._chunk_starts
        anywhere = self._chunk_starts + 1 + _random_below(bits, np.maximum(chunk_lengths - 1, 1))
        splits: Ints = np.where(high - low > 1, between, np.minimum(anywhere, self._chunk_ends))
        return splits

    def _sample_continuations(self, first_end: Ints, bits: RandomBits) -> tuple[Ints, Ints]:
        """Draw sentences of another document, with a length near that of the text after `first_end`."""
        document_first = self._first_sentences[self._document_ranks]
        document_size = (self._last_sentences - self._first_sentences)[self._document_ranks]
        sentence = _random_below(bits, len(self._sentence_edges) - 1 - document_size)
        sentence += np.where(
            sentence >= document_first, document_size, 0
        )  # skip the sentences of the chunk's own document
        rank = np.searchsorted(self._last_sentences, sentence, side="right")
        first, last = self._first_sentences[rank], self._last_sentences[rank]
        target_length = np.maximum(self._chunk_ends - first_end, 1)
        # not so close to the end of its document that the text would be too short, which would give the answer away
        latest = np.searchsorted(self._sentence_edges, self._sentence_edges[last] - target_length, side="right") - 1
        sentence = np.minimum(sentence, np.maximum(latest, first))
        start = self._sentence_edges[sentence]
        target_end, max_end = start + target_length, start + self.max_length - (first_end - self._chunk_starts)
        next_edge = np.minimum(np.searchsorted(self._sentence_edges, target_end), last)  # first edge >= target_end
        end_above = self._sentence_edges[next_edge]
        end_below = self._sentence_edges[np.maximum(next_edge - 1, sentence)]
        is_below_nearer = (target_end - end_below < end_above - target_end) | (end_above > max_end)
        nearest_end = np.where((end_below > start) & is_below_nearer, end_below, end_above)
        return start, np.minimum(nearest_end, max_end)


def _random_below(bits: RandomBits, limits: Ints) -> Ints:
    """Return a number in [0, limit) for each limit. With 64 bits, the bias of the modulo is negligible."""
    return (bits % limits.astype(np.uint64)).astype(np.int64)
