"""Batches: every pair once an epoch, never over budget, the same from any place on and with any number of workers."""

from __future__ import annotations

import threading
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.data.batching import DataPosition, EncodedPairs, PairBatch, PairBatches, evaluation_batches, plan_epoch
from qkv.errors import InputError

LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=200)


def encoded(lengths: list[tuple[int, int]]) -> EncodedPairs:
    """Pairs whose ids tell them apart: source n holds n, target n holds 1000 + n."""
    sources = [[number] * source for number, (source, _) in enumerate(lengths)]
    targets = [[1000 + number] * target for number, (_, target) in enumerate(lengths)]
    return EncodedPairs(sources, targets)


def varied(count: int) -> EncodedPairs:
    random = np.random.default_rng(0)
    return encoded([(int(a), int(b)) for a, b in random.integers(1, 15, (count, 2))])


def same(a: PairBatch, b: PairBatch) -> bool:
    return all(
        torch.equal(getattr(a, name), getattr(b, name))
        for name in ("source", "source_lengths", "target", "target_lengths")
    )


# Storage


def test_taken_pairs_come_packed_in_the_order_asked() -> None:
    pairs = EncodedPairs([[1, 2], [3], [4, 5, 6]], [[7], [], [8, 9]])
    batch = pairs.gather(np.array([2, 0, 1]))
    assert batch.source.tolist() == [4, 5, 6, 1, 2, 3]
    assert batch.source_lengths.tolist() == [3, 2, 1]
    assert batch.target.tolist() == [8, 9, 7]
    assert batch.target_lengths.tolist() == [2, 1, 0]
    assert {field.dtype for field in (batch.source, batch.source_lengths, batch.target)} == {torch.int64}
    assert len(batch) == 3
    assert batch.tokens == 9
    assert len(pairs) == 3
    assert pairs.source_lengths.tolist() == [2, 1, 3]
    assert pairs.target_lengths.tolist() == [1, 0, 2]


def test_a_batch_does_not_share_memory_with_the_store() -> None:
    pairs = varied(5)
    batch = pairs.gather(np.arange(5))
    batch.source.zero_()
    batch.source_lengths.zero_()
    assert pairs.gather(np.arange(5)).source.sum() > 0
    assert (pairs.source_lengths > 0).all()


def test_a_batch_moves_to_a_device_whole() -> None:
    moved = varied(3).gather(np.arange(3)).to("meta")
    assert {moved.source.device.type, moved.target_lengths.device.type} == {"meta"}
    assert len(moved) == 3


def test_unequal_sides_and_empty_sources_are_refused() -> None:
    with pytest.raises(InputError, match="2 sources and 1 targets"):
        EncodedPairs([[1], [2]], [[1]])
    with pytest.raises(InputError, match="pair 2: the source has no tokens"):
        EncodedPairs([[1], []], [[1], [2]])


# Splitting


@given(LENGTHS, st.integers(1, 12))
def test_the_parts_of_a_batch_add_up_to_it(lengths: list[tuple[int, int]], parts: int) -> None:
    batch = encoded(lengths).gather(np.arange(len(lengths)))
    cut = batch.split(parts)
    assert len(cut) == min(parts, len(batch))
    assert all(len(part) >= 1 for part in cut)
    names = ("source", "source_lengths", "target", "target_lengths")
    assert same(batch, PairBatch(*(torch.cat([getattr(part, name) for part in cut]) for name in names)))


@given(LENGTHS, st.integers(1, 12))
def test_parts_are_as_even_as_whole_pairs_allow(lengths: list[tuple[int, int]], parts: int) -> None:
    batch = encoded(lengths).gather(np.arange(len(lengths)))
    longest = max(map(sum, lengths))
    assert max(part.tokens for part in batch.split(parts)) <= batch.tokens / min(parts, len(batch)) + longest


def test_a_batch_in_no_parts_is_refused() -> None:
    with pytest.raises(InputError, match="0 micro-batches"):
        varied(2).gather(np.arange(2)).split(0)


# Planning


@given(LENGTHS, st.integers(60, 300), st.integers(0, 2**40), st.integers(0, 5), st.integers(1, 50))
def test_a_plan_covers_every_pair_once_within_the_budget(
    lengths: list[tuple[int, int]], budget: int, seed: int, epoch: int, pool: int
) -> None:
    sources, targets = np.array(lengths).T
    plan = plan_epoch(sources, targets, max_tokens=budget, seed=seed, epoch=epoch, bucket_pool=pool)
    assert sorted(np.concatenate(plan).tolist()) == list(range(len(lengths)))
    assert all(0 < (sources[batch] + targets[batch]).sum() <= budget for batch in plan)


def test_a_plan_is_a_function_of_seed_and_epoch() -> None:
    lengths = np.random.default_rng(0).integers(1, 20, (2, 500))

    def order(seed: int, epoch: int) -> list[list[int]]:
        return [batch.tolist() for batch in plan_epoch(*lengths, max_tokens=200, seed=seed, epoch=epoch)]

    assert order(1, 2) == order(1, 2)
    assert len({str(order(seed, epoch)) for seed in (1, 2) for epoch in (1, 2)}) == 4


def test_even_a_small_corpus_makes_other_batches_in_another_epoch() -> None:
    lengths = np.random.default_rng(0).integers(1, 20, (2, 100))
    first, second = (
        {frozenset(batch.tolist()) for batch in plan_epoch(*lengths, max_tokens=200, seed=0, epoch=epoch)}
        for epoch in (0, 1)
    )
    assert not first & second


def test_a_plan_stays_the_same_from_release_to_release() -> None:
    lengths = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    plan = plan_epoch(lengths, lengths[::-1], max_tokens=20, seed=7, epoch=3, bucket_pool=4)
    assert [batch.tolist() for batch in plan] == [[0], [5, 6], [2, 4], [3, 7, 1]]


def test_batches_hold_pairs_of_similar_length_and_come_in_mixed_order() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, (2, 4000))
    plan = plan_epoch(*lengths, max_tokens=2000, seed=0, epoch=0)
    spread = np.mean([np.ptp(lengths[0][batch]) for batch in plan])
    assert spread < 5
    means = [lengths[0][batch].mean() for batch in plan]
    assert means != sorted(means)


def test_batches_are_filled_close_to_the_budget() -> None:
    lengths = np.random.default_rng(0).integers(1, 15, (2, 4000))
    plan = plan_epoch(*lengths, max_tokens=1000, seed=0, epoch=0)
    assert len(plan) <= np.ceil(lengths.sum() / (1000 - 28))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"max_tokens": 39}, "pair 3 has 40 tokens.*39.*set train.batch_tokens to 40"),
        ({"seed": -1}, "set seed"),
        ({"bucket_pool": 0}, "pool"),
    ],
)
def test_an_impossible_plan_is_refused(change: dict[str, int], complaint: str) -> None:
    lengths = np.array([1, 5, 20])
    with pytest.raises(InputError, match=complaint):
        plan_epoch(lengths, lengths, **{"max_tokens": 100, "seed": 0, "epoch": 0, **change})  # type: ignore[arg-type]


def test_no_pairs_make_no_plan() -> None:
    with pytest.raises(InputError, match="no pairs"):
        plan_epoch(np.array([], dtype=int), np.array([], dtype=int), max_tokens=10, seed=0, epoch=0)


@given(st.lists(st.integers(1, 50), max_size=100), st.integers(1, 200))
def test_evaluation_batches_cover_everything_shortest_first(lengths: list[int], budget: int) -> None:
    batches = evaluation_batches(np.array(lengths, dtype=np.int64), budget)
    order = [index for batch in batches for index in batch.tolist()]
    assert order == sorted(range(len(lengths)), key=lengths.__getitem__)
    assert all(len(batch) == 1 or sum(lengths[index] for index in batch) <= budget for batch in batches)


# Running


def run(workers: int, place: DataPosition, count: int) -> list[tuple[DataPosition, PairBatch]]:
    return list(
        islice(
            PairBatches(varied(120), 150, seed=3, num_workers=workers).iterate_from(place.epoch, place.batch_index),
            count,
        )
    )


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_resuming_at_any_place_gives_the_same_tail(workers: int) -> None:
    count = 2 * PairBatches(varied(120), 150, seed=3).batches_per_epoch(0) + 3
    whole = run(0, DataPosition(0, 0), count)
    for done, (place, _) in enumerate(whole, 1):
        tail = run(workers, place, count - done)
        assert len(tail) == count - done
        for (expected_place, expected), (found_place, found) in zip(whole[done:], tail, strict=True):
            assert expected_place == found_place
            assert same(expected, found)


def test_an_epoch_holds_every_pair_once_and_the_next_starts_at_zero() -> None:
    batches = PairBatches(varied(120), 150, seed=3)
    count = batches.batches_per_epoch(0)
    epoch = list(islice(batches.iterate_from(0, 0), count))
    assert [place for place, _ in epoch] == [
        *(DataPosition(0, number) for number in range(1, count)),
        DataPosition(1, 0),
    ]
    seen = torch.cat([torch.unique_consecutive(batch.source) for _, batch in epoch])
    assert sorted(seen.tolist()) == list(range(120))


def test_the_end_of_an_epoch_is_the_start_of_the_next() -> None:
    batches = PairBatches(varied(120), 150, seed=3)
    at_end = next(batches.iterate_from(0, batches.batches_per_epoch(0)))
    at_start = next(batches.iterate_from(1, 0))
    assert at_end[0] == at_start[0]
    assert same(at_end[1], at_start[1])


def test_two_readers_do_not_disturb_each_other() -> None:
    batches = PairBatches(varied(120), 150, seed=3)
    count = batches.batches_per_epoch(0) + 2
    streams = [islice(batches.iterate_from(epoch, 1), count) for epoch in (0, 5)]
    mixed = list(zip(*streams, strict=True))
    for alone, found in zip(
        [run(0, DataPosition(0, 1), count), run(0, DataPosition(5, 1), count)], zip(*mixed, strict=True), strict=True
    ):
        assert all(same(wanted, batch) for (_, wanted), (_, batch) in zip(alone, found, strict=True))


def test_workers_read_a_bounded_number_ahead_and_stop_when_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = varied(120)
    taken: list[int] = []
    take = pairs.gather
    monkeypatch.setattr(pairs, "gather", lambda indices: (taken.append(len(indices)), take(indices))[1])
    before = threading.active_count()
    stream = PairBatches(pairs, 30, seed=3, num_workers=2).iterate_from(0, 0)
    next(stream)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("batches")]
    stream.close()  # type: ignore[attr-defined]
    for thread in threads:
        thread.join(timeout=5)
    assert threading.active_count() <= before
    assert 1 <= len(taken) <= 5


@pytest.mark.parametrize("place", [(0, 10_000), (0, -1), (-1, 0)])
def test_a_place_that_does_not_exist_is_refused_at_once(place: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=f"batch {place[1]} of epoch {place[0]} does not exist"):
        PairBatches(varied(120), 150, seed=3).iterate_from(*place)
