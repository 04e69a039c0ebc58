"""Documents cut to a model's length with no token lost, and batches of the pieces.

`ChunkedDocuments` keeps documents apart: a piece is (a part of) one document, so that attention never crosses a border.
`PackedDocuments` joins them end to end and cuts every `max_length` tokens, as for GPT-2: attention crosses borders.
Lengths count the tokens of the text; a model's [CLS] and [SEP] are the caller's, who asks for as many fewer.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from qkv.data.batching import BUCKET_POOL, ResumableBatches, balanced_split
from qkv.data.corpora.tokenized_corpus import TokenizedCorpus, expand_counts
from qkv.data.rng import Bools, CounterRNG, Ints, PackedChunks
from qkv.errors import InputError

STRATEGIES = ("even", "greedy", "sentences")


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Pieces of documents, in the documents' order; together they are all tokens, each once."""

    document: Ints  # [N]
    start: Ints  # [N] tokens of its document before it
    end: Ints  # [N]

    def __len__(self) -> int:
        return len(self.document)

    @property
    def lengths(self) -> Ints:
        return self.end - self.start


def chunk_documents(lengths: Ints, max_length: int, *, strategy: str = "even", sentence_ends: Ints | None = None) -> Chunks:
    """Cuts documents of `lengths` tokens into pieces of at most `max_length`; one that fits stays whole.

    A longer one is cut into as few pieces as will do:
    - even: all of nearly the same length, so that none is a scrap of a few tokens;
    - greedy: all but the last one of `max_length` tokens;
    - sentences: before the sentence that no longer fits, given where each one ends when all documents stand end to end
      (`TokenizedCorpus.sentence_ends`); a sentence over `max_length` is first cut as in `even`. This may take more pieces.
    """
    if max_length < 1:
        raise InputError(f"pieces of at most {max_length} tokens cannot be; use 1 or more")
    if strategy not in STRATEGIES:
        raise InputError(f"chunks are cut at {', '.join(STRATEGIES)}, not '{strategy}'")
    document_lengths = np.asarray(lengths, dtype=np.int64)
    if strategy == "sentences":
        if sentence_ends is None:
            raise InputError("pieces that end with a sentence need sentence_ends")
        return _chunk_at_sentences(document_lengths, max_length, sentence_ends)
    chunk_counts = -(-document_lengths // max_length)
    document, chunk_number = expand_counts(chunk_counts)
    if strategy == "greedy":
        begin = chunk_number * max_length
        return Chunks(document, begin, np.minimum(begin + max_length, document_lengths[document]))
    begin, end = (document_lengths[document] * (chunk_number + step) // chunk_counts[document] for step in (0, 1))
    return Chunks(document, begin, end)


def sentence_edges(sentence_ends: Ints, max_length: int) -> Ints:
    """Where units begin and end [units + 1]: sentences, or nearly even parts of one that is over `max_length`."""
    sentence_lengths = np.diff(sentence_ends, prepend=0)
    chunks = chunk_documents(sentence_lengths, max_length)
    return np.concatenate([np.zeros(1, np.int64), (sentence_ends - sentence_lengths)[chunks.document] + chunks.end])


def _chunk_at_sentences(document_lengths: Ints, max_length: int, sentence_ends: Ints) -> Chunks:
    edges = sentence_edges(sentence_ends, max_length)
    document_ends = np.cumsum(document_lengths)
    document_starts = document_ends - document_lengths
    if edges[-1] != document_lengths.sum():
        raise InputError(f"sentences of {edges[-1]} tokens in documents of {document_lengths.sum()}; give those of one corpus")
    chunk_ends = [document_ends[(document_lengths > 0) & (document_lengths <= max_length)]]
    for number in np.flatnonzero(document_lengths > max_length).tolist():
        low, high = np.searchsorted(edges, (document_starts[number], document_ends[number]))
        chunk_ends.append(np.array(_greedy_stops(edges[low : high + 1].tolist(), max_length)))
    end = np.sort(np.concatenate(chunk_ends))
    begin = np.concatenate([np.zeros(min(1, len(end)), np.int64), end[:-1]])  # the pieces leave nothing between them
    document = np.searchsorted(document_ends, begin, side="right")
    return Chunks(document, begin - document_starts[document], end - document_starts[document])


def _greedy_stops(edges: list[int], max_length: int) -> list[int]:
    """Of rising places, each at most `max_length` behind the one before: the fewest stops on the way to the last one."""
    stops: list[int] = []
    index = 0
    while index + 1 < len(edges):
        index = bisect.bisect_right(edges, edges[index] + max_length) - 1
        stops.append(edges[index])
    return stops


@dataclass(frozen=True, slots=True, eq=False)
class ChunkBatch:
    """Packed pieces, with the epoch that, beside seed and number, decides what is done to them.

    Where a piece is a pair, `first_lengths` is the length of its first segment and `is_next` says whether the second one really
    follows it.
    """

    epoch: int
    chunks: PackedChunks
    first_lengths: Ints | None = None  # [B]
    is_next: Bools | None = None  # [B]

    def __len__(self) -> int:
        return len(self.chunks.lengths)

    @property
    def tokens(self) -> int:
        return len(self.chunks.ids)

    def split(self, num_microbatches: int) -> list[ChunkBatch]:
        """Cut into at most `num_microbatches` consecutive batches of about equal token count, each of at least one piece."""
        if num_microbatches < 1:
            raise InputError(f"a batch cannot be split into {num_microbatches} parts; use 1 or more")
        ends = np.cumsum(self.chunks.lengths)
        edges = balanced_split(ends.tolist(), min(num_microbatches, len(self)))
        tokens = [int(ends[edge - 1]) if edge else 0 for edge in edges]
        return [self._slice(*edges[n : n + 2], *tokens[n : n + 2]) for n in range(len(edges) - 1)]

    def _slice(self, low: int, high: int, begin: int, end: int) -> ChunkBatch:
        ids, lengths, indices = self.chunks
        chunks = PackedChunks(ids[begin:end], lengths[low:high], indices[low:high])
        first_lengths = None if self.first_lengths is None else self.first_lengths[low:high]
        return ChunkBatch(self.epoch, chunks, first_lengths, None if self.is_next is None else self.is_next[low:high])


class ChunkSource(Protocol):
    """Numbered pieces of a corpus; which they are may change from epoch to epoch. Any number of threads may use one."""

    max_length: int

    def lengths(self, epoch: int) -> Ints:
        """Tokens of each piece [pieces]."""
        ...

    def gather(self, epoch: int, indices: Ints) -> ChunkBatch:
        """The chosen pieces, in that order."""
        ...


class ChunkedDocuments:
    """Each document by itself, cut where it is too long; the same pieces in every epoch."""

    def __init__(self, corpus: TokenizedCorpus, max_length: int, *, strategy: str = "even") -> None:
        self.corpus, self.max_length = corpus, max_length
        ends = corpus.sentence_ends if strategy == "sentences" else None
        self.chunks = chunk_documents(corpus.lengths, max_length, strategy=strategy, sentence_ends=ends)
        self._document_starts = corpus.document_starts

    def lengths(self, epoch: int) -> Ints:  # noqa: ARG002  # the same in every epoch
        return self.chunks.lengths

    def gather(self, epoch: int, indices: Ints) -> ChunkBatch:
        starts = self._document_starts[self.chunks.document[indices]]
        begins, ends = starts + self.chunks.start[indices], starts + self.chunks.end[indices]
        return ChunkBatch(epoch, PackedChunks(self.corpus.gather_spans(begins, ends), ends - begins, indices))


class PackedDocuments:
    """All documents end to end, in an order that seed and epoch decide, each with `separator_id` behind it, cut every
    `max_length` tokens; the last piece of an epoch is what is left."""

    def __init__(self, corpus: TokenizedCorpus, max_length: int, separator_id: int, *, seed: int) -> None:
        if max_length < 1:
            raise InputError(f"pieces of at most {max_length} tokens cannot be; use 1 or more")
        self.corpus, self.max_length, self.separator_id, self.seed = corpus, max_length, separator_id, seed
        self._document_starts = corpus.document_starts
        self._total_tokens = corpus.tokens + len(corpus)
        self._cached_layout = lru_cache(2)(self._layout)  # two: batches are made ahead of time, over the end of an epoch

    def _layout(self, epoch: int) -> tuple[Ints, Ints]:
        """The documents in order, and where each one's separator stands."""
        stream_index, count = np.zeros(1, np.int64), np.array([len(self.corpus)])
        order = np.argsort(CounterRNG(self.seed, epoch).random_bits(stream_index, count, "pack"), kind="stable")
        return order, np.cumsum(self.corpus.lengths[order] + 1) - 1

    def lengths(self, epoch: int) -> Ints:  # noqa: ARG002
        return chunk_documents(np.array([self._total_tokens]), self.max_length, strategy="greedy").lengths

    def gather(self, epoch: int, indices: Ints) -> ChunkBatch:
        order, separator_positions = self._cached_layout(epoch)
        begins = indices * self.max_length
        lengths = np.minimum(begins + self.max_length, self._total_tokens) - begins
        chunk, offset = expand_counts(lengths)
        positions = begins[chunk] + offset  # [T] among all documents with their separators
        ranks = np.searchsorted(separator_positions, positions)
        is_text = positions < separator_positions[ranks]
        document = order[ranks]
        offsets_in_document = positions - (separator_positions[ranks] - self.corpus.lengths[document])  # tokens of its document before it
        ids = np.full(len(positions), self.separator_id, dtype=np.int64)
        ids[is_text] = self.corpus.tokens_at((self._document_starts[document] + offsets_in_document)[is_text])
        return ChunkBatch(epoch, PackedChunks(ids, lengths, indices))


class ChunkBatches(ResumableBatches[ChunkBatch]):
    """The endless run of batches of pieces, of at most `max_tokens` tokens each; see `ResumableBatches.iterate_from`.

    Pieces of like length share a batch; `bucket_pool=1` mixes all lengths.
    """

    def __init__(self, source: ChunkSource, max_tokens: int, seed: int, num_workers: int = 0, bucket_pool: int = BUCKET_POOL) -> None:
        if source.max_length > max_tokens:
            reason = f"a piece may have {source.max_length} tokens and a batch {max_tokens}"
            raise InputError(f"{reason}; set train.batch_tokens to {source.max_length} or more, or cut shorter pieces")
        super().__init__(max_tokens, seed, num_workers, bucket_pool)
        self._source = source

    def _lengths(self, epoch: int) -> tuple[Ints, Ints]:
        lengths = self._source.lengths(epoch)
        if not len(lengths):
            raise InputError("the corpus has no pieces to make batches of; give more text")
        return lengths, np.zeros_like(lengths)

    def _collate(self, epoch: int, indices: Ints) -> ChunkBatch:
        return self._source.gather(epoch, indices)
