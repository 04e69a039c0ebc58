"""Several sets in one run of batches: each as often as it should be, whenever the run is entered."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pytest

from qkv.data.batching import EncodedPairs
from qkv.data.mixing import MixedBatches, mixing_rates
from qkv.errors import InputError

SIZES = [12, 5, 3]


def batches(parts: list[float], seed: int = 1) -> MixedBatches:
    """Pairs whose source is their number, so that a batch tells which they are."""
    pairs = EncodedPairs([[number] for number in range(sum(SIZES))], [[0]] * sum(SIZES))
    return MixedBatches(pairs, SIZES, parts, max_tokens=8, seed=seed)


def test_without_weights_sets_count_by_their_size_and_the_more_alike_the_higher_the_temperature() -> None:
    none = [None] * 3
    assert mixing_rates(SIZES, none) == pytest.approx([0.6, 0.25, 0.15])
    roots = np.sqrt(SIZES)
    assert mixing_rates(SIZES, none, 2.0) == pytest.approx((roots / roots.sum()).tolist())
    assert mixing_rates(SIZES, none, 1e9) == pytest.approx([1 / 3] * 3)


def test_weights_count_whatever_the_sizes_are() -> None:
    assert mixing_rates(SIZES, [1.0, 2.0, 1.0], 3.0) == pytest.approx([0.25, 0.5, 0.25])


def test_weights_of_some_sets_only_are_refused() -> None:
    with pytest.raises(InputError, match=r"some datasets have a weight"):
        mixing_rates(SIZES, [1.0, None, 1.0])


def test_in_proportion_to_size_an_epoch_holds_every_pair_once() -> None:
    mixed = batches(mixing_rates(SIZES, [None] * 3))
    for epoch in range(3):
        assert sorted(mixed.epoch_indices(epoch).tolist()) == list(range(20))


def test_a_small_set_of_large_weight_is_seen_evenly_over_epochs() -> None:
    mixed = batches([0.1, 0.1, 0.8])
    seen = Counter(int(number) for epoch in range(30) for number in mixed.epoch_indices(epoch))
    small = [seen[number] for number in range(17, 20)]
    assert sum(small) == 30 * 16
    assert max(small) - min(small) <= 1
    assert {seen[number] for number in range(12)} == {5}  # 2 of 12 an epoch, thirty times


def test_a_run_entered_anywhere_goes_on_with_the_batches_of_one_never_left() -> None:
    whole = list(islice(batches([0.2, 0.2, 0.6]).iterate_from(0, 0), 12))
    place = whole[6][0]
    again = list(islice(batches([0.2, 0.2, 0.6]).iterate_from(place.epoch, place.batch_index), 5))
    assert [b.source.tolist() for _, b in again] == [b.source.tolist() for _, b in whole[7:12]]


def test_another_seed_draws_another_order() -> None:
    assert (
        batches([0.2, 0.2, 0.6]).epoch_indices(0).tolist() != batches([0.2, 0.2, 0.6], seed=2).epoch_indices(0).tolist()
    )
