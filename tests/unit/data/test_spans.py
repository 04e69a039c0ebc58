"""Span corruption: the paper's figures, sentinels in order, and a target that rebuilds the text."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.data.batching import PairBatch
from qkv.data.noise.config import SpanCorruptionConfig
from qkv.data.noise.span_corruption import corrupt_spans, max_chunk_tokens
from qkv.data.rng import CounterRNG, PackedChunks
from qkv.errors import InputError

sys.path.append(str(Path(__file__).parent))
from pretraining import MARKS, SENTINELS, alone, counted, cut, marks, text, varied

CHANCE = CounterRNG(seed=4, epoch=1)
PLACES = {token: place for place, token in enumerate(SENTINELS)}


def sides(batch: PairBatch) -> list[tuple[list[int], list[int]]]:
    """Source and target of each piece."""
    sources, targets = cut(batch.source, batch.source_lengths), cut(batch.target, batch.target_lengths)
    return list(zip(sources, targets, strict=True))


def rebuilt(source: list[int], target: list[int]) -> list[int]:
    """Each sentinel of the source replaced by what follows it in the target."""
    spans: dict[int, list[int]] = {}
    for token in target:
        if token in PLACES:
            spans[token] = []
            last = spans[token]
        else:
            last.append(token)
    return [word for token in source for word in spans.get(token, [token])]


def sizes(target: list[int]) -> list[int]:
    """Lengths of the spans."""
    places = [place for place, token in enumerate(target) if token in PLACES]
    return [after - place - 1 for place, after in pairwise(places)]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 80), min_size=1, max_size=9),
    st.floats(0.01, 0.9),
    st.floats(1, 9),
    st.integers(0, 2**40),
)
def test_the_target_rebuilds_the_text(lengths: list[int], rate: float, mean: float, epoch: int) -> None:
    pieces = text(lengths)
    found = corrupt_spans(
        pieces, MARKS, CounterRNG(0, epoch), SpanCorruptionConfig(noise_density=rate, mean_noise_span_length=mean)
    )
    for (source, target), ids in zip(sides(found), cut(pieces.ids, pieces.lengths), strict=True):
        assert rebuilt(source, target) == ids


def test_sentinels_come_in_order_and_one_more_closes_the_target() -> None:
    for source, target in sides(corrupt_spans(text(varied(500)), MARKS, CHANCE)):
        inside = [PLACES[token] for token in source if token in PLACES]
        assert inside == list(range(len(inside)))
        assert [PLACES[token] for token in target if token in PLACES] == [*inside, len(inside)]
        assert target[-1] == SENTINELS[len(inside)]


def test_no_two_spans_touch_and_none_is_empty() -> None:
    for source, target in sides(corrupt_spans(text(varied(500)), MARKS, CHANCE)):
        assert not any(a in PLACES and b in PLACES for a, b in pairwise(source))
        assert all(size > 0 for size in sizes(target))


def test_five_hundred_tokens_have_seventy_five_in_twenty_five_spans() -> None:
    """The paper's own example (section 3.3.4): 15 % of 500 tokens in 25 spans are 75 tokens, three in the mean."""
    for _, target in sides(corrupt_spans(text([500] * 20), MARKS, CHANCE)):
        assert len(sizes(target)) == 25
        assert sum(sizes(target)) == 75


def test_fifteen_percent_are_asked_for_in_spans_of_three_in_the_mean() -> None:
    pieces = text(varied(3000, 20, 400))
    spans = [size for _, target in sides(corrupt_spans(pieces, MARKS, CHANCE)) for size in sizes(target)]
    assert sum(spans) / len(pieces.ids) == pytest.approx(0.15, abs=0.001)
    assert np.mean(spans) == pytest.approx(3.0, abs=0.03)


def test_every_piece_has_its_share_to_less_than_one() -> None:
    for (_, target), ids in zip(sides(corrupt_spans(text(varied(500)), MARKS, CHANCE)), varied(500), strict=True):
        assert abs(sum(sizes(target)) - 0.15 * ids) < 1
        assert abs(len(sizes(target)) - sum(sizes(target)) / 3) < 1


def test_every_arrangement_is_as_likely_as_another() -> None:
    """Three tokens of seven in two spans: 2 ways to cut them, C(5, 2) places."""
    found = corrupt_spans(
        counted([7] * 20000), MARKS, CHANCE, SpanCorruptionConfig(noise_density=3 / 7, mean_noise_span_length=1.5)
    )
    seen = Counter(tuple(source) for source, _ in sides(found))
    assert len(seen) == 20
    assert min(seen.values()) > 880
    assert max(seen.values()) < 1120


def test_a_piece_may_begin_and_end_with_a_span() -> None:
    sources = [source for source, _ in sides(corrupt_spans(text([10] * 1000), MARKS, CHANCE))]
    assert any(source[0] in PLACES for source in sources)
    assert any(source[-1] in PLACES for source in sources)
    assert any(source[0] not in PLACES and source[-1] not in PLACES for source in sources)


def test_short_pieces_keep_a_token_and_from_two_tokens_on_lose_one() -> None:
    for n in (2, 3, 4):
        for source, target in sides(corrupt_spans(text([n] * 50), MARKS, CHANCE)):
            assert len(sizes(target)) == 1
            assert any(token not in PLACES for token in source)
    lonely = corrupt_spans(counted([1]), MARKS, CHANCE)
    assert (lonely.source.tolist(), lonely.target.tolist()) == ([5], [SENTINELS[0]])


def test_spans_do_not_depend_on_the_batch_and_are_fresh_each_epoch() -> None:
    pieces = text(varied(60))
    together = sides(corrupt_spans(pieces, MARKS, CHANCE))
    for row, pair in enumerate(together):
        assert sides(corrupt_spans(alone(pieces, row), MARKS, CHANCE)) == [pair]
    assert together == sides(corrupt_spans(pieces, MARKS, CounterRNG(4, 1)))
    assert together != sides(corrupt_spans(pieces, MARKS, CounterRNG(4, 2)))
    assert together != sides(corrupt_spans(pieces, MARKS, CounterRNG(5, 1)))


def test_a_special_token_lies_in_no_span_and_the_text_around_it_is_rebuilt() -> None:
    pieces = text(varied(300, 2, 60), framed=True)
    for (source, target), ids in zip(
        sides(corrupt_spans(pieces, MARKS, CHANCE)), cut(pieces.ids, pieces.lengths), strict=True
    ):
        assert rebuilt(source, target) == ids
        assert not any(MARKS.is_special[token] for token in target if token not in PLACES)
        assert [token for token in source if token < 5] == [token for token in ids if token < 5]


def test_too_few_sentinels_are_refused_with_the_length_that_needs_them() -> None:
    with pytest.raises(InputError, match="a chunk of 500 tokens needs 26 sentinels and the vocabulary has 3"):
        corrupt_spans(text([20, 500]), marks(sentinel_ids=SENTINELS[:3]), CHANCE)
    with pytest.raises(InputError, match="noise_density is 0"):
        SpanCorruptionConfig(noise_density=0)
    with pytest.raises(InputError, match="at least one token"):
        SpanCorruptionConfig(mean_noise_span_length=0.5)


@pytest.mark.parametrize(
    "how",
    [
        SpanCorruptionConfig(),
        SpanCorruptionConfig(noise_density=0.5, mean_noise_span_length=1),
        SpanCorruptionConfig(noise_density=0.3, mean_noise_span_length=8),
    ],
)
@pytest.mark.parametrize("source", [10, 50, 150])
def test_the_longest_piece_fits_and_one_token_more_may_not(source: int, how: SpanCorruptionConfig) -> None:
    many = marks(sentinel_ids=SENTINELS * 2)

    def longest(length: int) -> int:
        return int(corrupt_spans(text([length] * 400), many, CHANCE, how).source_lengths.max()) + 1  # the end token

    piece = max_chunk_tokens(source, how)
    assert longest(piece) <= source < longest(piece + 1)


def test_the_papers_sizes_fit() -> None:
    assert max_chunk_tokens(512) == 567  # where the authors, who round to the nearest, cut 568


def test_pieces_come_back_as_int64() -> None:
    found = corrupt_spans(PackedChunks.from_arrays([5, 6, 7], [3], [0]), MARKS, CHANCE)
    assert {str(x.dtype) for x in (found.source, found.source_lengths, found.target)} == {"torch.int64"}
