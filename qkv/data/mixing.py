"""Several sets of pairs in one run of batches, each as often as its weight says (Raffel et al. 2020, 3.5.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qkv.data.batching import EncodedPairs, Ints, PairBatch, ResumableBatches
from qkv.errors import InputError


def mixing_rates(dataset_sizes: Sequence[int], weights: Sequence[float | None], temperature: float = 1.0) -> list[float]:
    """How much of an epoch each set gets: by weights, or by sizes to the power of 1 / temperature.

    A temperature of 1 is in proportion to size; the higher it is, the more alike are the shares.
    """
    given_weights = [weight for weight in weights if weight is not None]
    if given_weights and len(given_weights) < len(dataset_sizes):
        raise InputError("data.mix: some sets have a weight and some have none; give each one, or none")
    rates = given_weights or [dataset_size ** (1 / temperature) for dataset_size in dataset_sizes]
    return [rate / sum(rates) for rate in rates]


class MixedBatches(ResumableBatches[PairBatch]):
    """The endless run of batches of several sets, which lie one behind the other in `pairs`.

    An epoch has as many pairs as there are in all. Each set is walked through in an order of its own, drawn anew
    whenever it begins again, and an epoch goes on where the one before it stopped: so every pair of a set is seen
    equally often, and what an epoch holds is a function of the seed and its number alone.
    """

    def __init__(
        self,
        pairs: EncodedPairs,
        dataset_sizes: Sequence[int],
        rates: Sequence[float],
        max_tokens: int,
        seed: int,
        num_workers: int = 0,
    ) -> None:
        super().__init__(max_tokens, seed, num_workers)
        self._pairs, self._dataset_sizes = pairs, list(dataset_sizes)
        self._pairs_per_epoch = [max(1, round(rate * len(pairs))) for rate in rates]  # pairs of each set in an epoch
        self._cached_indices: tuple[int, Ints] | None = None  # the last epoch asked for

    def epoch_indices(self, epoch: int) -> Ints:
        """The pairs of an epoch, by their number in all sets together."""
        cached_indices = self._cached_indices
        if cached_indices is None or cached_indices[0] != epoch:
            starts = np.cumsum(self._dataset_sizes) - self._dataset_sizes
            index_arrays = [start + self._dataset_indices(dataset_number, epoch) for dataset_number, start in enumerate(starts)]
            self._cached_indices = cached_indices = epoch, np.concatenate(index_arrays)
        return cached_indices[1]

    def _dataset_indices(self, dataset_number: int, epoch: int) -> Ints:
        size, count = self._dataset_sizes[dataset_number], self._pairs_per_epoch[dataset_number]
        first, last = epoch * count, (epoch + 1) * count
        passes = [self._shuffled_dataset(dataset_number, pass_number) for pass_number in range(first // size, -(-last // size))]
        return np.concatenate(passes)[first % size :][:count]

    def _shuffled_dataset(self, dataset_number: int, pass_number: int) -> Ints:
        # raw draws, as in `plan_epoch`: their stream is the same in every version of numpy
        bit_generator = np.random.PCG64(np.random.SeedSequence([self._seed, dataset_number, pass_number, len(self._dataset_sizes)]))
        return np.argsort(bit_generator.random_raw(self._dataset_sizes[dataset_number]), kind="stable")

    def _lengths(self, epoch: int) -> tuple[Ints, Ints]:
        indices = self.epoch_indices(epoch)
        return self._pairs.source_lengths[indices], self._pairs.target_lengths[indices]

    def _collate(self, epoch: int, indices: Ints) -> PairBatch:
        return self._pairs.gather(self.epoch_indices(epoch)[indices])
