"""Streams: a corpus as contiguous texts that are read side by side, in segments, by a model with memory.

All documents are concatenated and divided into streams of nearly equal length. A batch has the next segment of every
stream. Where a document ends inside a segment, the segment has several pieces: each is a chunk of its own, and the
model begins it with an empty memory. With a separator the documents are one text, and memory is carried across their
ends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from qkv.data.batching import DataPosition, next_position
from qkv.data.corpora.chunks import ChunkBatch
from qkv.data.corpora.segments import Segments
from qkv.data.corpora.tokenized_corpus import TokenizedCorpus, expand_counts
from qkv.data.prefetch import prefetch_map
from qkv.data.rng import CounterRNG, Ints, PackedChunks, uniform
from qkv.errors import InputError

_MIN_STREAM = 2  # predicted tokens per stream: shorter ones would end before the last segment
_MIN_RANDOM_LENGTH = 5  # Merity et al. 2018, section 5
_HALF_PROBABILITY, _LENGTH_STD = 0.05, 5.0


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """How a corpus becomes streams."""

    num_streams: int
    """Number of streams; fewer if the corpus is too short for them."""
    segment_length: int
    """Longest segment in tokens of the model's input."""
    overlap: int = 0
    """Tokens of a segment that the following one repeats: 1 if its last token is a label only."""
    bos_id: int | None = None
    """Token before each document; None: none."""
    separator_id: int | None = None
    """Token after each document, across which memory is carried; None: memory is reset after each document."""
    random_length: int | None = None
    """Mean length of segments whose length is drawn at random (Merity et al. 2018); None: lengths are nearly equal."""
    max_tokens: int | None = None
    """Number of tokens from the beginning of the corpus that are used; None: all."""
    is_shuffled: bool = True
    """Whether documents are in random order, given by seed and epoch."""


class _Epoch(NamedTuple):
    """The concatenation of all documents in the order of one epoch."""

    order: Ints  # [documents] indices in the corpus
    starts: Ints  # [documents + 1] first position of each document, special tokens included
    unit_starts: Ints  # [documents + 1] first unit of each text; a unit is a position of the model's input
    segment_edges: Ints  # [segments + 1] offsets in every stream


class TextStreams:
    """Infinite, resumable iterator over segments of streams."""

    def __init__(self, corpus: TokenizedCorpus, options: StreamOptions, seed: int, num_workers: int = 0) -> None:
        self._corpus, self._options, self._seed, self._num_workers = corpus, options, seed, num_workers
        self._document_starts = corpus.document_starts
        # two epochs: at the end of an epoch, batches of the next one are prefetched
        self._epoch = lru_cache(2)(self._plan_epoch)
        self._num_units = self._count_units()
        if self._num_units < _MIN_STREAM:
            raise InputError("the text has no token to predict; give more text or longer documents")
        self.num_streams = min(options.num_streams, self._num_units // _MIN_STREAM)
        self._stream_edges = self._num_units * np.arange(self.num_streams + 1) // self.num_streams

    @property
    def _num_special(self) -> int:
        """Number of special tokens per document."""
        return (self._options.bos_id is not None) + (self._options.separator_id is not None)

    def _count_units(self) -> int:
        num_units = int(self._text_lengths(np.arange(len(self._corpus))).sum())
        return num_units if self._options.max_tokens is None else min(num_units, self._options.max_tokens)

    def _text_lengths(self, order: Ints) -> Ints:
        """Return the number of units of each text: a document, or with a separator all of them together."""
        lengths = self._corpus.lengths[order] + self._num_special
        if self._options.separator_id is not None:
            lengths = lengths.sum(keepdims=True)
        return np.maximum(lengths - self._options.overlap, 0)

    def _plan_epoch(self, epoch: int) -> _Epoch:
        order = np.arange(len(self._corpus))
        if self._options.is_shuffled:
            bits = CounterRNG(self._seed, epoch).random_bits(np.zeros(1, np.int64), np.array([len(order)]), "streams")
            order = np.argsort(bits, kind="stable")
        starts = np.cumsum([0, *(self._corpus.lengths[order] + self._num_special)])
        unit_starts = np.cumsum([0, *self._text_lengths(order)])
        return _Epoch(order, starts, unit_starts, self._segment_edges(epoch))

    def _segment_edges(self, epoch: int) -> Ints:
        stream_length = int(np.diff(self._stream_edges).max())
        if self._options.random_length is None:
            num_segments = -(-stream_length // self._options.segment_length)
            return stream_length * np.arange(num_segments + 1) // num_segments
        lengths = self._random_lengths(epoch, -(-stream_length // _MIN_RANDOM_LENGTH))
        edges = np.cumsum([0, *lengths])
        num_segments = int(np.searchsorted(edges, stream_length))
        edges = np.append(edges[:num_segments], stream_length)
        if edges[-1] - edges[-2] < _MIN_STREAM and num_segments > 1:  # shorter streams would have no last segment
            edges[-2] -= 1
        return edges

    def _random_lengths(self, epoch: int, count: int) -> Ints:
        """Return lengths with the mean `random_length`, half of it in one case of 20 (Merity et al. 2018)."""
        mean = self._options.random_length or self._options.segment_length
        bits = CounterRNG(self._seed, epoch).random_bits_table(np.arange(count), 3, "bptt")  # [count, 3]
        draws = uniform(bits)
        normal = np.sqrt(-2 * np.log1p(-draws[:, 0])) * np.cos(2 * math.pi * draws[:, 1])  # Box & Muller 1958
        means = np.where(draws[:, 2] < _HALF_PROBABILITY, mean / 2, mean)
        lengths = np.round(means + _LENGTH_STD * normal).astype(np.int64)
        longest = max(self._options.segment_length, _MIN_RANDOM_LENGTH)
        return np.asarray(np.clip(lengths, _MIN_RANDOM_LENGTH, longest), dtype=np.int64)

    def batches_per_epoch(self, epoch: int) -> int:
        """Return the number of batches of an epoch."""
        return len(self._epoch(epoch).segment_edges) - 1

    def iterate_from(self, epoch: int, batch_index: int) -> Iterator[tuple[DataPosition, ChunkBatch]]:
        """Yield the batches from `batch_index` of `epoch` on, each with the position after it, from which to resume."""
        if epoch < 0 or not 0 <= batch_index <= self.batches_per_epoch(max(epoch, 0)):
            detail = f"this data has {self.batches_per_epoch(max(epoch, 0))} batches per epoch"
            raise InputError(
                f"batch {batch_index} of epoch {epoch} does not exist ({detail}); "
                "resume with the data, batch size and seed of the checkpoint"
            )
        return prefetch_map(self._load_batch, self._positions(epoch, batch_index), self._num_workers, "streams")

    def _positions(self, epoch: int, batch_index: int) -> Iterator[tuple[int, int]]:
        for current in itertools.count(epoch):
            first = batch_index if current == epoch else 0
            yield from ((current, index) for index in range(first, self.batches_per_epoch(current)))

    def _load_batch(self, position: tuple[int, int]) -> tuple[DataPosition, ChunkBatch]:
        epoch, index = position
        return next_position(epoch, index, self.batches_per_epoch(epoch)), self.batch(epoch, index)

    def batch(self, epoch: int, index: int) -> ChunkBatch:
        """Return the segments of one step: the pieces of all streams, in the order of the streams."""
        plan = self._epoch(epoch)
        begin, end = plan.segment_edges[index : index + 2]
        first_units = self._stream_edges[:-1] + begin
        last_units = np.minimum(self._stream_edges[:-1] + end, self._stream_edges[1:])
        texts_before = np.searchsorted(plan.unit_starts, first_units, side="right") - 1
        texts_after = np.searchsorted(plan.unit_starts, last_units, side="left")  # the text after the last one
        streams, offset = expand_counts(texts_after - texts_before)
        texts = texts_before[streams] + offset
        begins = np.maximum(first_units[streams], plan.unit_starts[texts])
        ends = np.minimum(last_units[streams], plan.unit_starts[texts + 1])
        is_piece = ends > begins  # a text of one token may have nothing to predict
        streams, texts, begins, ends = (values[is_piece] for values in (streams, texts, begins, ends))
        starts_text = begins == plan.unit_starts[texts]
        text_positions = plan.starts[texts] if self._options.separator_id is None else 0
        positions = begins - plan.unit_starts[texts] + text_positions
        lengths = ends - begins + self._options.overlap
        ids = self._tokens(plan, positions, lengths)
        segments = Segments(
            streams=streams,
            starts=starts_text | (index == 0),
            num_streams=self.num_streams,
            total_streams=self.num_streams,
            lr_factor=float(end - begin) / (self._options.random_length or float(end - begin)),
        )
        chunk_indices = begins  # distinct in an epoch
        return ChunkBatch(epoch, PackedChunks(ids, lengths, chunk_indices), segments=segments)

    def _tokens(self, plan: _Epoch, begins: Ints, lengths: Ints) -> Ints:
        """Return the tokens of the spans from `begins` on in the concatenation, special tokens included."""
        span, offset = expand_counts(lengths)
        positions = begins[span] + offset
        ranks = np.searchsorted(plan.starts, positions, side="right") - 1
        offsets = positions - plan.starts[ranks] - (self._options.bos_id is not None)
        documents = plan.order[ranks]
        is_text = (offsets >= 0) & (offsets < self._corpus.lengths[documents])
        ids = np.zeros(len(positions), dtype=np.int64)
        ids[is_text] = self._corpus.tokens_at((self._document_starts[documents] + offsets)[is_text])
        ids[offsets < 0] = -1 if self._options.bos_id is None else self._options.bos_id
        is_end = offsets >= self._corpus.lengths[documents]
        ids[is_end] = -1 if self._options.separator_id is None else self._options.separator_id
        return ids
