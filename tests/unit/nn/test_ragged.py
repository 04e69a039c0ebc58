from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.errors import InputError
from qkv.nn import BatchLayout, Ragged

SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=6)
quick = settings(deadline=None, max_examples=40)


def numbered(sizes: list[int]) -> list[torch.Tensor]:
    """Sequences whose tokens tell sequence and place: [[10, 11, …], [20, …], …]."""
    return [torch.tensor([[10.0 * (b + 1) + t, -t] for t in range(n)]).view(n, 2) for b, n in enumerate(sizes)]


@quick
@given(SIZES)
def test_packed_sequences_come_back_as_they_were(sizes: list[int]) -> None:
    sequences = numbered(sizes)
    back = Ragged.pack(sequences).sequences()
    assert all(torch.equal(a, b) for a, b in zip(sequences, back, strict=True))


@quick
@given(SIZES)
def test_a_layout_is_even_where_all_are_equally_long(sizes: list[int]) -> None:
    assert BatchLayout(sizes).is_uniform == (len(set(sizes)) == 1)


@quick
@given(SIZES)
def test_to_padded_is_undone_by_from_padded(sizes: list[int]) -> None:
    ragged = Ragged.pack(numbered(sizes))
    back = Ragged.from_padded(ragged.to_padded(), ragged.layout.lengths)
    assert torch.equal(back.values, ragged.values)


@quick
@given(SIZES, st.integers(1, 3))
def test_from_padded_takes_only_what_is_real(sizes: list[int], spare: int) -> None:
    padded = torch.full((len(sizes), max(sizes) + spare, 2), float("nan"))
    for row, sequence in zip(padded, numbered(sizes), strict=True):
        row[: len(sequence)] = sequence
    assert torch.equal(Ragged.from_padded(padded, sizes).values, torch.cat(numbered(sizes)))


@quick
@given(SIZES)
def test_to_padded_fills_behind_each_end(sizes: list[int]) -> None:
    padded = Ragged.pack(numbered(sizes)).to_padded(fill_value=-7.5)
    assert all(bool((row[n:] == -7.5).all()) for row, n in zip(padded, sizes, strict=True))


@quick
@given(SIZES)
def test_positions_count_from_zero_in_each_sequence(sizes: list[int]) -> None:
    assert BatchLayout(sizes).positions.tolist() == [t for n in sizes for t in range(n)]


@quick
@given(SIZES)
def test_offsets_are_where_sequences_begin_and_end(sizes: list[int]) -> None:
    assert BatchLayout(sizes).cu_seqlens.tolist() == [sum(sizes[:b]) for b in range(len(sizes) + 1)]


@quick
@given(SIZES)
def test_real_is_true_for_as_many_places_as_a_sequence_is_long(sizes: list[int]) -> None:
    assert BatchLayout(sizes).valid_mask().tolist() == [[t < n for t in range(max(sizes))] for n in sizes]


@quick
@given(SIZES.filter(any))
def test_time_major_walks_step_by_step_longest_first(sizes: list[int]) -> None:
    order = sorted(range(len(sizes)), key=lambda b: -sizes[b])
    walk = [[b, t] for t in range(max(sizes)) for b in order if sizes[b] > t]
    place = torch.tensor([[b, t] for b, n in enumerate(sizes) for t in range(n)])
    assert place[BatchLayout(sizes).time_major().permutation].tolist() == walk


@quick
@given(SIZES.filter(any))
def test_time_major_inverse_undoes_its_permutation(sizes: list[int]) -> None:
    time = BatchLayout(sizes).time_major()
    assert time.permutation[time.inverse].tolist() == list(range(sum(sizes)))


@quick
@given(SIZES.filter(any))
def test_alive_counts_the_sequences_that_reach_a_step(sizes: list[int]) -> None:
    assert BatchLayout(sizes).time_major().batch_sizes == [sum(n > t for n in sizes) for t in range(max(sizes))]


def test_lengths_may_be_a_tensor() -> None:
    assert Ragged.from_lengths(torch.arange(5), torch.tensor([2, 3])).layout.lengths_list == (2, 3)


def test_to_padded_passes_gradients_to_tokens_only() -> None:
    values = torch.randn(5, 2, requires_grad=True)
    weights = torch.randn(2, 3, 2)
    (Ragged.from_lengths(values, [2, 3]).to_padded() * weights).sum().backward()
    assert torch.equal(values.grad, torch.cat([weights[0, :2], weights[1]]))


def test_like_keeps_the_layout_so_that_plans_are_shared() -> None:
    ragged = Ragged.from_lengths(torch.arange(5), [2, 3])
    assert ragged.with_values(torch.zeros(5)).layout is ragged.layout


@pytest.mark.parametrize("sizes", [[], [0], [3, 0, 2]])
def test_an_empty_batch_or_sequence_is_refused(sizes):
    with pytest.raises(InputError, match="at least one"):
        BatchLayout(sizes)


@pytest.mark.parametrize("lengths", [[5], [1, 1], [2, 2, 2]])
def test_lengths_that_do_not_fit_a_padded_batch_are_refused(lengths):
    with pytest.raises(InputError, match="do not fit"):
        Ragged.from_padded(torch.zeros(max(1, len(lengths) - 1), 3), lengths)


def test_lengths_that_do_not_add_up_to_the_tokens_are_refused():
    with pytest.raises(InputError, match="cannot be split"):
        Ragged.from_lengths(torch.zeros(4), [2, 3])
