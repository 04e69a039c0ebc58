"""Chunks of documents that fit a model's length, without losing a token, and batches of chunks.

In `ChunkedDocuments` a chunk is one document or a part of one, so attention never crosses a document boundary.
`PackedDocuments` concatenates all documents and splits them every `max_length` tokens, as for GPT-2. Lengths count the
tokens of the text; the caller subtracts the special tokens of the model's template.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np

from qkv.data.batching import BUCKET_POOL, ResumableBatches, balanced_split
from qkv.data.corpora.segments import Segments
from qkv.data.corpora.tokenized_corpus import TokenizedCorpus, expand_counts
from qkv.data.rng import Bools, CounterRNG, Ints, PackedChunks
from qkv.errors import InputError

STRATEGIES = ("even", "greedy", "sentences")


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Chunks of documents, in document order, that together have every token once."""

    document: Ints  # [N] index of the document
    start: Ints  # [N] first token in the document
    end: Ints  # [N] last token + 1

    def __len__(self) -> int:
        return len(self.document)

    @property
    def lengths(self) -> Ints:
        """Number of tokens of each chunk [N]."""
        return self.end - self.start


def chunk_documents(
    lengths: Ints, max_length: int, *, strategy: str = "even", sentence_ends: Ints | None = None
) -> Chunks:
    """Split documents of `lengths` tokens into chunks of at most `max_length`; a document that fits is one chunk.

    A longer document is split by one of the STRATEGIES:
    - even: as few chunks as possible, of nearly equal length, so that none has only a few tokens;
    - greedy: chunks of `max_length` tokens; the last one has the rest;
    - sentences: before the sentence that no longer fits, which may take more chunks. `sentence_ends` are positions in
      the concatenated documents (`TokenizedCorpus.sentence_ends`). A sentence over `max_length` is split as in `even`.
    """
    if max_length < 1:
        raise InputError(f"max_length is {max_length}; use 1 or more")
    if strategy not in STRATEGIES:
        raise InputError(f"chunking strategy '{strategy}' is unknown; known: {', '.join(STRATEGIES)}")
    document_lengths = np.asarray(lengths, dtype=np.int64)
    if strategy == "sentences":
        if sentence_ends is None:
            raise InputError("the strategy 'sentences' needs sentence_ends")
        return _chunk_at_sentences(document_lengths, max_length, sentence_ends)
    chunk_counts = -(-document_lengths // max_length)
    document, chunk_number = expand_counts(chunk_counts)
    if strategy == "greedy":
        begin = chunk_number * max_length
        return Chunks(document, begin, np.minimum(begin + max_length, document_lengths[document]))
    begin, end = (document_lengths[document] * (chunk_number + step) // chunk_counts[document] for step in (0, 1))
    return Chunks(document, begin, end)


def sentence_edges(sentence_ends: Ints, max_length: int) -> Ints:
    """Return the edges of the sentences [N + 1]; sentences over `max_length` are split into nearly equal parts."""
    sentence_lengths = np.diff(sentence_ends, prepend=0)
    chunks = chunk_documents(sentence_lengths, max_length)
    return np.concatenate([np.zeros(1, np.int64), (sentence_ends - sentence_lengths)[chunks.document] + chunks.end])


def _chunk_at_sentences(document_lengths: Ints, max_length: int, sentence_ends: Ints) -> Chunks:
    edges = sentence_edges(sentence_ends, max_length)
    document_ends = np.cumsum(document_lengths)
    document_starts = document_ends - document_lengths
    if edges[-1] != document_lengths.sum():
        raise InputError(
            f"the sentences have {edges[-1]} tokens and the documents {document_lengths.sum()}; use one corpus"
        )
    chunk_ends = [document_ends[(document_lengths > 0) & (document_lengths <= max_length)]]
    for number in np.flatnonzero(document_lengths > max_length).tolist():
        low, high = np.searchsorted(edges, (document_starts[number], document_ends[number]))
        chunk_ends.append(np.array(_greedy_stops(edges[low : high + 1].tolist(), max_length)))
    end = np.sort(np.concatenate(chunk_ends))
    begin = np.concatenate([np.zeros(min(1, len(end)), np.int64), end[:-1]])  # chunks are contiguous
    document = np.searchsorted(document_ends, begin, side="right")
    return Chunks(document, begin - document_starts[document], end - document_starts[document])


def _greedy_stops(edges: list[int], max_length: int) -> list[int]:
    """Return the fewest of the increasing `edges` at which to split, at most `max_length` apart, up to the last."""
    stops: list[int] = []
    index = 0
    while index + 1 < len(edges):
        index = bisect.bisect_right(edges, edges[index] + max_length) - 1
        stops.append(edges[index])
    return stops


@dataclass(frozen=True, slots=True, eq=False)
class ChunkBatch:
    """Packed chunks of one epoch; with seed and index, the epoch determines their noise."""

    epoch: int
    chunks: PackedChunks
    first_lengths: Ints | None = None  # [B] length of the first segment, if a chunk is a pair of segments
    is_next: Bools | None = None  # [B] whether the second segment follows the first in the corpus
    segments: Segments | None = None  # the streams that the chunks continue, if the model carries memory

    def __len__(self) -> int:
        return len(self.chunks.lengths)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.chunks.ids)

    def split(self, num_microbatches: int) -> list[ChunkBatch]:
        """Split into at most `num_microbatches` consecutive, nonempty batches of similar token count."""
        if num_microbatches < 1:
            raise InputError(f"a batch cannot be split into {num_microbatches} micro-batches; use 1 or more")
        ends = np.cumsum(self.chunks.lengths)
        if self.segments is not None:
            return self._split_streams(self.segments, min(num_microbatches, self.segments.num_streams))
        edges = balanced_split(ends.tolist(), min(num_microbatches, len(self)))
        tokens = [int(ends[edge - 1]) if edge else 0 for edge in edges]
        return [self._slice(*edges[n : n + 2], *tokens[n : n + 2]) for n in range(len(edges) - 1)]

    def _split_streams(self, segments: Segments, num_groups: int) -> list[ChunkBatch]:
        """Split by streams, so that a stream is always in the same micro-batch."""
        tokens = np.cumsum([0, *self.chunks.lengths])
        return [
            replace(
                self._slice(pieces.start, pieces.stop, int(tokens[pieces.start]), int(tokens[pieces.stop])),
                segments=group,
            )
            for pieces, group in segments.split(num_groups)
        ]

    def _slice(self, low: int, high: int, begin: int, end: int) -> ChunkBatch:
        ids, lengths, indices = self.chunks
        chunks = PackedChunks(ids[begin:end], lengths[low:high], indices[low:high])
        first_lengths = None if self.first_lengths is None else self.first_lengths[low:high]
        return ChunkBatch(self.epoch, chunks, first_lengths, None if self.is_next is None else self.is_next[low:high])


class ChunkSource(Protocol):
    """Indexed chunks of a corpus, which can differ between epochs. Implementations are thread-safe."""

    max_length: int

    def lengths(self, epoch: int) -> Ints:
        """Return the number of tokens of each chunk [N]."""
        ...

    def gather(self, epoch: int, indices: Ints) -> ChunkBatch:
        """Return the chunks of the given indices, in that order."""
        ...


class ChunkedDocuments:
    """Each document by itself, split if it is too long; the same chunks in every epoch."""

    def __init__(self, corpus: TokenizedCorpus, max_length: int, *, strategy: str = "even") -> None:
        self.corpus, self.max_length = corpus, max_length
        ends = corpus.sentence_ends if strategy == "sentences" else None
        self.chunks = chunk_documents(corpus.lengths, max_length, strategy=strategy, sentence_ends=ends)
        self._document_starts = corpus.document_starts

    def lengths(self, epoch: int) -> Ints:  # noqa: ARG002  # the same in every epoch
        """Return the number of tokens of each chunk [N]."""
        return self.chunks.lengths

    def gather(self, epoch: int, indices: Ints) -> ChunkBatch:
        """Return the chunks of the given indices, in that order."""
        starts = self._document_starts[self.chunks.document[indices]]
        begins, ends = starts + self.chunks.start[indices], starts + self.chunks.end[indices]
        return ChunkBatch(epoch, PackedChunks(self.corpus.gather_spans(begins, ends), ends - begins, indices))


class PackedDocuments:
    """All documents, each followed by `separator_id`, concatenated in random order and split every `max_length` tokens.

    The order depends on seed and epoch. The last chunk of an epoch has the remaining tokens.
    """

    def __init__(self, corpus: TokenizedCorpus, max_length: int, separator_id: int, *, seed: int) -> None:
        if max_length < 1:
            raise InputError(f"max_length is {max_length}; use 1 or more")
        self.corpus, self.max_length, self.separator_id, self.seed = corpus, max_length, separator_id, seed
        self._document_starts = corpus.document_starts
        self._total_tokens = corpus.tokens + len(corpus)
        # two epochs: at the end of an epoch, batches of the next one are prefetched
        self._cached_layout = lru_cache(2)(self._layout)

    def _layout(self, epoch: int) -> tuple[Ints, Ints]:
        """Return the order of the documents, and the position of the separator after each."""
        stream_index, count = np.zeros(1, np.int64), np.array([len(self.corpus)])
        order = np.argsort(CounterRNG(self.seed, epoch).random_bits(stream_index, count, "pack"), kind="stable")
        return order, np.cumsum(self.corpus.lengths[order] + 1) - 1

    def lengths(self, epoch: int) -> Ints:  # noqa: ARG002  # the same in every epoch
        """Return the number of tokens of each chunk [N]."""
        return chunk_documents(np.array([self._total_tokens]), self.max_length, strategy="greedy").lengths

    def gather(self, epoch: int, indices: Ints) -> ChunkBatch:
        """Return the chunks of the given indices, in that order."""
        order, separator_positions = self._cached_layout(epoch)
        begins = indices * self.max_length
        lengths = np.minimum(begins + self.max_length, self._total_tokens) - begins
        chunk, offset = expand_counts(lengths)
        positions = begins[chunk] + offset  # [T] in the concatenation of all documents with separators
        ranks = np.searchsorted(separator_positions, positions)
        is_text = positions < separator_positions[ranks]
        document = order[ranks]
        offsets_in_document = positions - (separator_positions[ranks] - self.corpus.lengths[document])
        ids = np.full(len(positions), self.separator_id, dtype=np.int64)
        ids[is_text] = self.corpus.tokens_at((self._document_starts[document] + offsets_in_document)[is_text])
        return ChunkBatch(epoch, PackedChunks(ids, lengths, indices))


class ChunkBatches(ResumableBatches[ChunkBatch]):
    """Infinite, resumable iterator over batches of at most `max_tokens` tokens and at most `max_examples` chunks.

    Chunks of similar length share a batch; `bucket_pool=1` mixes all lengths.
    """

    def __init__(
        self,
        source: ChunkSource,
        max_tokens: int | None,
        seed: int,
        num_workers: int = 0,
        bucket_pool: int = BUCKET_POOL,
        max_examples: int | None = None,
    ) -> None:
        if max_tokens is not None and source.max_length > max_tokens:
            reason = f"a chunk can have {source.max_length} tokens, but a batch only {max_tokens}"
            raise InputError(f"{reason}; set train.batch_tokens to {source.max_length} or more, or use shorter chunks")
        super().__init__(max_tokens, seed, num_workers, bucket_pool, max_examples)
        self._source = source

    def _lengths(self, epoch: int) -> tuple[Ints, Ints]:
        lengths = self._source.lengths(epoch)
        if not len(lengths):
            raise InputError("the corpus has no chunks to train on; give more text")
        return lengths, np.zeros_like(lengths)

    def _collate(self, epoch: int, indices: Ints) -> ChunkBatch:
        return self._source.gather(epoch, indices)
