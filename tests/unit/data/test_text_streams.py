"""Streams of a corpus: every token is read once, in order, and memory begins where a text begins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.data.corpora.chunks import ChunkBatch
from qkv.data.corpora.text_streams import StreamOptions, TextStreams
from qkv.data.corpora.tokenized_corpus import TokenBlock, TokenizedCorpus
from qkv.errors import InputError

BOS, SEPARATOR = 900, 901


def corpus_of(lengths: list[int]) -> TokenizedCorpus:
    ids = np.concatenate([100 * number + np.arange(length) for number, length in enumerate(lengths)])
    ends = np.cumsum(lengths)
    return TokenizedCorpus([TokenBlock(ids.astype(np.uint16), ends, ends)])


def units(batches: list[ChunkBatch], num_streams: int, overlap: int) -> list[tuple[int, int | None, bool]]:
    """Return each token of the input, its label and whether memory begins at it, one stream after the other."""
    streams: list[list[tuple[int, int | None, bool]]] = [[] for _ in range(num_streams)]
    for batch in batches:
        assert batch.segments is not None
        pieces = np.split(batch.chunks.ids, np.cumsum(batch.chunks.lengths)[:-1])
        for ids, stream, starts in zip(pieces, batch.segments.streams, batch.segments.starts, strict=True):
            for place in range(len(ids) - overlap):
                label = int(ids[place + 1]) if overlap else None
                streams[stream].append((int(ids[place]), label, bool(starts) and place == 0))
    return [unit for stream in streams for unit in stream]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6).filter(lambda lengths: sum(lengths) > 8),
    num_streams=st.integers(1, 4),
    length=st.integers(2, 7),
    overlap=st.integers(0, 1),
    has_bos=st.booleans(),
    is_joined=st.booleans(),
    is_random=st.booleans(),
)
def test_every_token_is_read_once_and_memory_begins_with_each_text(
    lengths: list[int], num_streams: int, length: int, overlap: int, has_bos: bool, is_joined: bool, is_random: bool
) -> None:
    options = StreamOptions(
        num_streams=num_streams,
        segment_length=8 if is_random else length,
        overlap=overlap,
        bos_id=BOS if has_bos else None,
        separator_id=SEPARATOR if is_joined else None,
        random_length=6 if is_random else None,
        is_shuffled=False,
    )
    streams = TextStreams(corpus_of(lengths), options, seed=1)
    texts = [
        [*([BOS] * has_bos), *(100 * number + place for place in range(size)), *([SEPARATOR] * is_joined)]
        for number, size in enumerate(lengths)
    ]
    if is_joined:
        texts = [[token for text in texts for token in text]]
    expected = [
        (text[place], text[place + 1] if overlap else None, place == 0)
        for text in texts
        for place in range(len(text) - overlap)
    ]
    batches = [streams.batch(0, index) for index in range(streams.batches_per_epoch(0))]
    read = units(batches, streams.num_streams, overlap)
    first = {len(expected) * stream // streams.num_streams for stream in range(streams.num_streams)}
    assert read == [(token, label, start or n in first) for n, (token, label, start) in enumerate(expected)]
    for batch in batches:  # every stream has a segment in every batch, also after a split
        assert set(batch.segments.streams) == set(range(streams.num_streams))  # type: ignore[union-attr]
        parts = batch.split(2)
        assert np.array_equal(np.concatenate([part.chunks.ids for part in parts]), batch.chunks.ids)
        assert sum(part.segments.num_streams for part in parts) == streams.num_streams  # type: ignore[union-attr]


def test_resuming_at_any_batch_gives_the_rest() -> None:
    options = StreamOptions(num_streams=2, segment_length=3, overlap=1, random_length=None)
    streams = TextStreams(corpus_of([9, 8, 7]), options, seed=4)
    whole = streams.iterate_from(0, 0)
    batches = [next(whole) for _ in range(streams.batches_per_epoch(0) + 3)]
    for number, (position, _) in enumerate(batches[:-1]):
        _, resumed = next(streams.iterate_from(position.epoch, position.batch_index))
        assert np.array_equal(resumed.chunks.ids, batches[number + 1][1].chunks.ids)
        assert np.array_equal(resumed.segments.starts, batches[number + 1][1].segments.starts)  # type: ignore[union-attr]


def test_random_lengths_have_their_mean_and_scale_the_learning_rate() -> None:
    options = StreamOptions(num_streams=1, segment_length=90, overlap=1, random_length=70)
    streams = TextStreams(corpus_of([60_000]), options, seed=4)
    batches = [streams.batch(0, index) for index in range(streams.batches_per_epoch(0) - 1)]
    lengths = np.array([batch.chunks.lengths[0] - 1 for batch in batches])
    assert lengths.min() >= 5
    assert abs(lengths.mean() - (0.95 * 70 + 0.05 * 35)) < 1
    assert [batch.segments.lr_factor for batch in batches] == pytest.approx(lengths / 70)  # type: ignore[union-attr]


def test_text_without_a_token_to_predict_is_refused() -> None:
    with pytest.raises(InputError, match="no token to predict"):
        TextStreams(corpus_of([1, 1]), StreamOptions(num_streams=1, segment_length=4, overlap=1), seed=0)
