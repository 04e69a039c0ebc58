"""Masks and noises: the papers' shares, nothing special touched, and the same for a piece whatever is around it."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.data.noise.config import DenoisingConfig, MLMConfig
from qkv.data.noise.denoising import add_noise, delete_tokens, infill_spans, permute_sentences, rotate_chunks
from qkv.data.noise.mlm import mask_tokens
from qkv.data.rng import CounterRNG, PackedChunks
from qkv.errors import InputError
from qkv.tokenization.vocab_tables import VocabTables

sys.path.append(str(Path(__file__).parent))
from pretraining import CLS, MARKS, MASK, SEP, STOP, VOCABULARY, alone, counted, cut, marks, text, varied

CHANCE = CounterRNG(seed=11, epoch=2)
WHOLE = MLMConfig(whole_word=True)
ORDINARY = np.flatnonzero(~MARKS.is_special)


# Masks (Devlin et al. 2019)


@pytest.fixture(scope="module")
def pieces() -> PackedChunks:
    return text(varied(2000), framed=True)


@pytest.mark.parametrize("how", [MLMConfig(), WHOLE], ids=["tokens", "whole words"])
def test_fifteen_percent_of_the_text_is_asked_for(pieces: PackedChunks, how: MLMConfig) -> None:
    found = mask_tokens(pieces, MARKS, CHANCE, how)
    assert len(found.positions) / (~MARKS.is_special[pieces.ids]).sum() == pytest.approx(0.15, abs=0.001)


def test_each_piece_has_its_share_to_less_than_a_token(pieces: PackedChunks) -> None:
    asked = np.zeros(len(pieces.ids), dtype=bool)
    asked[mask_tokens(pieces, MARKS, CHANCE).positions] = True
    for chosen, ids in zip(cut(asked, pieces.lengths), cut(pieces.ids, pieces.lengths), strict=True):
        assert abs(sum(chosen) - 0.15 * (len(ids) - 3)) < 1


@pytest.mark.parametrize("length", [1, 2, 3, 7])
@pytest.mark.parametrize("how", [MLMConfig(), WHOLE], ids=["tokens", "whole words"])
def test_short_pieces_are_asked_no_more_and_no_less(length: int, how: MLMConfig) -> None:
    short = text([length] * 20000)
    assert len(mask_tokens(short, MARKS, CHANCE, how).positions) / len(short.ids) == pytest.approx(0.15, abs=0.006)


def test_of_those_eighty_percent_are_masked_ten_replaced_and_ten_kept(pieces: PackedChunks) -> None:
    found = mask_tokens(pieces, MARKS, CHANCE)
    there = found.ids[found.positions]
    assert (there == MASK).double().mean().item() == pytest.approx(0.8, abs=0.007)
    assert (there == found.labels).double().mean().item() == pytest.approx(0.1, abs=0.005)
    assert ((there != MASK) & (there != found.labels)).double().mean().item() == pytest.approx(0.1, abs=0.005)


def test_labels_are_what_stood_there_and_all_else_is_left_alone(pieces: PackedChunks) -> None:
    found = mask_tokens(pieces, MARKS, CHANCE)
    before = torch.from_numpy(pieces.ids)
    assert torch.equal(found.labels, before[found.positions])
    restored = found.ids.clone()
    restored[found.positions] = found.labels
    assert torch.equal(restored, before)
    assert torch.equal(found.lengths, torch.from_numpy(pieces.lengths))
    assert (found.positions.diff() > 0).all()


def test_no_special_token_is_asked_for_or_put_in(pieces: PackedChunks) -> None:
    found = mask_tokens(pieces, MARKS, CHANCE, MLMConfig(mask_token_prob=0.0, random_token_prob=1.0))
    assert not MARKS.is_special[found.labels].any()
    assert not MARKS.is_special[found.ids[found.positions]].any()


def test_any_token_of_text_is_put_in_as_often_as_another(pieces: PackedChunks) -> None:
    found = mask_tokens(pieces, MARKS, CHANCE, MLMConfig(mask_prob=1.0, mask_token_prob=0.0, random_token_prob=1.0))
    counts = np.bincount(found.ids[found.positions], minlength=VOCABULARY)[ORDINARY]
    expected = len(found.positions) / len(ORDINARY)  # about 220 of each
    assert ((counts - expected) ** 2 / expected).sum() < len(ORDINARY) + 4 * math.sqrt(2 * len(ORDINARY))


def test_every_place_is_asked_for_as_often_as_another() -> None:
    found = mask_tokens(text([20] * 20000), MARKS, CHANCE)
    shares = np.bincount(found.positions % 20, minlength=20) / 20000
    assert np.abs(shares - 0.15).max() < 0.01


def test_a_word_is_asked_for_with_all_its_tokens_or_not_at_all(pieces: PackedChunks) -> None:
    asked = np.zeros(len(pieces.ids), dtype=bool)
    asked[mask_tokens(pieces, MARKS, CHANCE, WHOLE).positions] = True
    longest = 0
    for ids, chosen in zip(cut(pieces.ids, pieces.lengths), cut(asked, pieces.lengths), strict=True):
        size = 1
        for (token, one), (following, other) in pairwise(zip(ids, chosen, strict=True)):
            same = (
                not MARKS.is_special[token]
                and not MARKS.is_special[following]
                and MARKS.is_subword_continuation[following]
            )
            assert one == other or not same
            size = size + 1 if same else 1
            longest = max(longest, size)
    assert longest > 3, "no long words: nothing was tested"


def test_masks_are_fresh_each_epoch_and_equal_for_equal_seed_epoch_and_number(pieces: PackedChunks) -> None:
    def at(chance: CounterRNG) -> set[int]:
        return set(mask_tokens(pieces, MARKS, chance).positions.tolist())

    first, again = at(CounterRNG(11, 2)), at(CounterRNG(11, 2))
    assert first == again
    for other in (at(CounterRNG(11, 3)), at(CounterRNG(12, 2))):
        assert len(first & other) / len(first) == pytest.approx(0.15, abs=0.01)  # as chance has it


def test_a_pieces_stream_is_the_one_that_numpy_jumps_to() -> None:
    words = CounterRNG(3, 4).random_bits(np.array([5, 0, 2**40]), np.array([2, 3, 1]), "mask")
    first = np.random.PCG64(np.random.SeedSequence([3, 4, int.from_bytes(b"mask", "big")]))
    jumped = [first.jumped(5).random_raw(2), first.jumped(0).random_raw(3), first.jumped(2**40).random_raw(1)]
    assert words.tolist() == np.concatenate(jumped).tolist()


def test_equal_pieces_with_other_numbers_get_other_masks() -> None:
    one = PackedChunks.from_arrays(np.tile(np.arange(5, 105), 2), [100, 100], [0, 1])
    found = mask_tokens(one, MARKS, CHANCE)
    assert set(found.positions[found.positions < 100].tolist()) != set(
        (found.positions[found.positions >= 100] - 100).tolist()
    )


def test_the_masks_of_an_old_run_are_those_of_today() -> None:
    """A checkpoint may outlive a version: these numbers must never change."""
    assert mask_tokens(counted([30, 9]), MARKS, CounterRNG(1, 0)).positions.tolist() == [0, 21, 24, 26, 35]
    assert infill_spans(counted([12]), MARKS, CounterRNG(1, 0)).ids.tolist() == [5, 6, 7, 8, 9, 4, 13, 14, 15, 16]


def test_what_cannot_be_masked_is_refused_in_one_line() -> None:
    few = text([4])
    with pytest.raises(InputError, match="no mask token"):
        mask_tokens(few, marks(mask_id=None), CHANCE)
    with pytest.raises(InputError, match="does not mark where a word begins"):
        mask_tokens(few, marks(is_subword_continuation=None), CHANCE, WHOLE)
    with pytest.raises(InputError, match="does not mark where a sentence ends"):
        permute_sentences(few, marks(is_sentence_end=None), CHANCE)
    with pytest.raises(InputError, match="token id 1000 is outside the vocabulary of 1000 tokens"):
        mask_tokens(PackedChunks.from_arrays([1000], [1], [0]), MARKS, CHANCE)
    with pytest.raises(InputError, match="give a fraction between 0 and 1"):
        MLMConfig(mask_prob=1.5)
    with pytest.raises(InputError, match="more than 1"):
        MLMConfig(mask_token_prob=0.8, random_token_prob=0.3)
    with pytest.raises(InputError, match="seed -1"):
        mask_tokens(few, MARKS, CounterRNG(-1, 0))


@pytest.mark.parametrize("wrong", [([1, 2], [1], [0]), ([1], [1], [0, 1]), ([1], [1, 0], [0, 1]), ([1], [1], [-1])])
def test_pieces_that_do_not_add_up_are_refused(wrong: tuple[list[int], ...]) -> None:
    with pytest.raises(InputError):
        PackedChunks.from_arrays(*wrong)


# Noises (Lewis et al. 2020)


def filled(pieces: PackedChunks, **how: float) -> tuple[int, int]:
    """How many tokens are gone, and how many masks stand for them."""
    found = infill_spans(pieces, MARKS, CHANCE, **how)
    masks = int((found.ids == MASK).sum())
    return len(pieces.ids) - (len(found.ids) - masks), masks


def test_thirty_percent_of_the_tokens_lie_in_spans_of_three_in_the_mean() -> None:
    pieces = counted(varied(1000, 200, 800))
    gone, masks = filled(pieces)
    assert gone / len(pieces.ids) == pytest.approx(0.3, abs=0.002)
    assert gone / masks == pytest.approx(3.0, abs=0.03)


@pytest.mark.parametrize("length", [1, 2, 5, 20])
def test_short_pieces_lose_their_share_too(length: int) -> None:
    pieces = counted([length] * 20000)
    assert filled(pieces)[0] / len(pieces.ids) == pytest.approx(0.3, abs=0.015)


def test_span_lengths_are_poisson_and_some_are_none() -> None:
    """Spans are rare here, so that hardly any two are neighbours and each gap is one span."""
    length, pieces = 20000, 80
    found = infill_spans(counted([length] * pieces), VocabTables(np.arange(length + 5) < 5, mask_id=MASK), CHANCE, 0.02)
    kept, masks = found.ids[found.ids != MASK], int((found.ids == MASK).sum())
    missing = (np.diff(kept) - 1) % length  # also over the border of two pieces, where numbers begin again
    spans = np.bincount(missing[missing > 0])
    spans[0] = masks - spans.sum()
    for size in range(9):
        expected = math.exp(-3) * 3**size / math.factorial(size)
        assert spans[size] / masks == pytest.approx(expected, abs=0.012), size


def test_a_span_is_one_mask_and_the_rest_keeps_its_order() -> None:
    found = infill_spans(counted(varied(300)), MARKS, CHANCE)
    for ids in cut(found.ids, found.lengths):
        kept = [token for token in ids if token != MASK]
        assert kept == sorted(kept)
        gaps = sum(after - token > 1 for token, after in pairwise([4, *kept]))
        assert ids.count(MASK) >= gaps


def test_spans_lie_anywhere() -> None:
    found = infill_spans(counted([20] * 20000), MARKS, CHANCE)
    kept = np.bincount(found.ids[found.ids != MASK] - 5, minlength=20) / 20000
    assert np.abs(kept[4:-4] - kept[4:-4].mean()).max() < 0.015
    assert np.abs(kept - kept[::-1]).max() < 0.015  # a span lies within its piece, so that the ends are in fewer


def test_sentences_are_shuffled_whole_and_every_order_is_as_likely() -> None:
    one = [20, 21, STOP, 30, STOP, 40, 41, 42, STOP]
    sentences = {tuple(one[:3]), tuple(one[3:5]), tuple(one[5:])}
    found = permute_sentences(
        PackedChunks.from_arrays([CLS, *one, SEP] * 6000, [11] * 6000, np.arange(6000)), MARKS, CHANCE
    )
    orders: Counter[tuple[int, ...]] = Counter()
    for ids in cut(found.ids, found.lengths):
        assert (ids[0], ids[-1]) == (CLS, SEP)
        orders[tuple(ids[1:-1])] += 1
    assert len(orders) == 6
    assert min(orders.values()) > 900
    assert max(orders.values()) < 1100
    for order in orders:
        ends = [-1, *(place for place, token in enumerate(order) if token == STOP)]
        assert {order[a + 1 : b + 1] for a, b in pairwise(ends)} == sentences


def test_text_behind_the_last_full_stop_is_a_sentence_too() -> None:
    found = permute_sentences(PackedChunks.from_arrays([20, STOP, 30] * 50, [3] * 50, np.arange(50)), MARKS, CHANCE)
    assert {tuple(ids) for ids in cut(found.ids, found.lengths)} == {(20, STOP, 30), (30, 20, STOP)}


def test_a_rotated_piece_begins_with_any_of_its_tokens_as_likely() -> None:
    pieces = PackedChunks.from_arrays([CLS, *range(20, 25), SEP] * 10000, [7] * 10000, np.arange(10000))
    found = rotate_chunks(pieces, MARKS, CHANCE)
    begins = Counter(ids[1] for ids in cut(found.ids, found.lengths))
    assert all(1850 < begins[token] < 2150 for token in range(20, 25))
    for ids in cut(found.ids, found.lengths):
        assert (ids[0], ids[-1]) == (CLS, SEP)
        assert ids[1:-1] == [20 + (ids[1] - 20 + place) % 5 for place in range(5)]
    half = rotate_chunks(pieces, MARKS, CHANCE, 0.5)
    turned = sum(ids[1] != 20 for ids in cut(half.ids, half.lengths)) / 10000
    assert turned == pytest.approx(0.4, abs=0.02)  # of the half that is turned, a fifth begins where it began


def test_deleted_tokens_leave_no_trace_and_no_piece_is_emptied() -> None:
    pieces = counted(varied(1000))
    found = delete_tokens(pieces, MARKS, CHANCE, 0.2)
    assert 1 - len(found.ids) / len(pieces.ids) == pytest.approx(0.2, abs=0.002)
    assert (found.lengths > 0).all()
    assert all(ids == sorted(ids) for ids in cut(found.ids, found.lengths))
    assert delete_tokens(text([1, 2, 3]), MARKS, CHANCE, 1.0).lengths.tolist() == [1, 1, 1]


ALL = DenoisingConfig(permute_sentences=True, rotate_prob=0.5, delete_prob=0.1, infill_ratio=0.3)
NOISES: dict[str, Callable[[PackedChunks, CounterRNG], PackedChunks]] = {
    "permute": lambda pieces, chance: permute_sentences(pieces, MARKS, chance),
    "rotate": lambda pieces, chance: rotate_chunks(pieces, MARKS, chance),
    "delete": lambda pieces, chance: delete_tokens(pieces, MARKS, chance, 0.2),
    "infill": lambda pieces, chance: infill_spans(pieces, MARKS, chance),
    "all": lambda pieces, chance: noisy(pieces, chance),
    "mask": lambda pieces, chance: pieces._replace(ids=mask_tokens(pieces, MARKS, chance).ids.numpy()),
    "whole words": lambda pieces, chance: pieces._replace(ids=mask_tokens(pieces, MARKS, chance, WHOLE).ids.numpy()),
}


def noisy(pieces: PackedChunks, chance: CounterRNG) -> PackedChunks:
    found = add_noise(pieces, MARKS, chance, ALL)
    return pieces._replace(ids=found.source.numpy(), lengths=found.source_lengths.numpy())


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES.keys())
def test_what_happens_to_a_piece_does_not_depend_on_its_batch(
    noise: Callable[[PackedChunks, CounterRNG], PackedChunks],
) -> None:
    pieces = text(varied(40), framed=True)
    together = noise(pieces, CHANCE)
    for row, ids in enumerate(cut(together.ids, together.lengths)):
        assert noise(alone(pieces, row), CHANCE).ids.tolist() == ids


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES.keys())
def test_every_epoch_has_its_own_noise(noise: Callable[[PackedChunks, CounterRNG], PackedChunks]) -> None:
    pieces = text(varied(40, 20), framed=True)
    pieces.ids[8::9] = STOP
    found = [noise(pieces, CounterRNG(5, epoch)).ids.tolist() for epoch in (0, 0, 1)]
    assert found[0] == found[1]
    assert found[0] != found[2]


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES.keys())
def test_special_tokens_stay_and_those_at_the_ends_stay_there(
    noise: Callable[[PackedChunks, CounterRNG], PackedChunks],
) -> None:
    found = noise(text(varied(200, 2), framed=True), CHANCE)
    for ids in cut(found.ids, found.lengths):
        assert (ids[0], ids[-1]) == (CLS, SEP)
        assert ids.count(SEP) == 2
        assert ids.count(CLS) == 1


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES.keys())
def test_pieces_without_text_come_through(noise: Callable[[PackedChunks, CounterRNG], PackedChunks]) -> None:
    pieces = PackedChunks.from_arrays([CLS, SEP, 20, SEP], [2, 1, 1], [0, 1, 2])
    found = noise(pieces, CHANCE)
    assert cut(found.ids, found.lengths)[::2] == [[CLS, SEP], [SEP]]
    assert noise(alone(pieces, 0), CHANCE).ids.tolist() == [CLS, SEP]


def test_the_target_is_the_text_as_it_was() -> None:
    pieces = text(varied(50))
    found = add_noise(pieces, MARKS, CHANCE, ALL)
    assert found.target.tolist() == pieces.ids.tolist()
    assert found.target_lengths.tolist() == pieces.lengths.tolist()
    untouched = add_noise(pieces, MARKS, CHANCE, DenoisingConfig(permute_sentences=False, infill_ratio=0.0))
    assert untouched.source.tolist() == pieces.ids.tolist()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.floats(0, 1), st.floats(0.5, 6), st.integers(0, 9))
def test_infilled_text_is_the_text_with_gaps(lengths: list[int], rate: float, mean: float, epoch: int) -> None:
    pieces = text(lengths, framed=True)
    found = infill_spans(pieces, MARKS, CounterRNG(0, epoch), rate, mean)
    assert found.lengths.sum() == len(found.ids)
    for before, after in zip(cut(pieces.ids, pieces.lengths), cut(found.ids, found.lengths), strict=True):
        left = iter(before)
        assert all(token in left for token in after if token != MASK)  # a subsequence
