"""`train.batch_size`: batches of a number of examples, in every workload."""

from __future__ import annotations

import numpy as np
import pytest

from qkv.data.batching import EncodedPairs, PairBatches, plan_epoch


@pytest.mark.parametrize("count", [1, 7, 40])
def test_a_plan_by_examples_has_full_batches_and_every_example_once(count: int) -> None:
    lengths = np.arange(1, 33)
    plan = plan_epoch(lengths, lengths, max_tokens=None, max_examples=count, seed=1, epoch=0)
    assert sorted(np.concatenate(plan)) == list(range(32))
    sizes = sorted((len(batch) for batch in plan), reverse=True)
    assert sizes == [*[min(count, 32)] * (32 // count), *([32 % count] if 32 % count and count < 32 else [])] or (
        count > 32 and sizes == [32]
    )


def test_both_limits_hold_if_both_are_set() -> None:
    lengths = np.full(30, 5)
    plan = plan_epoch(lengths, lengths, max_tokens=30, max_examples=2, seed=1, epoch=0)
    assert {len(batch) for batch in plan} == {2}


def test_batches_of_pairs_have_the_number_of_examples() -> None:
    pairs = EncodedPairs([[1] * n for n in range(1, 21)], [[2]] * 20)
    batches = PairBatches(pairs, None, seed=1, max_examples=5).iterate_from(0, 0)
    assert [len(next(batches)[1]) for _ in range(4)] == [5] * 4
