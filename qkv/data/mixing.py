"""Training on several datasets of pairs, mixed in given proportions (Raffel et al. 2020, section 3.5.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qkv.data.batching import EncodedPairs, Ints, PairBatch, ResumableBatches
from qkv.errors import InputError


def mixing_rates(
    dataset_sizes: Sequence[int], weights: Sequence[float | None], temperature: float = 1.0
) -> list[float]:
    """Return the fraction of an epoch for each dataset: by weights, or by sizes to the power of 1 / temperature.

    With a temperature of 1, fractions are proportional to the sizes; higher temperatures make them more equal.
    """
    set_weights = [weight for weight in weights if weight is not None]
    if set_weights and len(set_weights) < len(dataset_sizes):
        raise InputError("data.datasets: some datasets have a weight and some have none; give a weight to all or none")
    rates = set_weights or [dataset_size ** (1 / temperature) for dataset_size in dataset_sizes]
    return [rate / sum(rates) for rate in rates]


class MixedBatches(ResumableBatches[PairBatch]):
    """Infinite, resumable iterator over batches of several datasets, which are concatenated in `pairs`.

    An epoch has as many pairs as all datasets together. Each dataset is read in a random order that is drawn again for
    each pass, and an epoch continues a pass where the previous epoch stopped. So all pairs of a dataset are used
    equally often, and the content of an epoch depends only on the seed and the epoch.
    """

    def __init__(
        self,
        pairs: EncodedPairs,
        dataset_sizes: Sequence[int],
        rates: Sequence[float],
        max_tokens: int | None,
        seed: int,
        num_workers: int = 0,
        max_examples: int | None = None,
    ) -> None:
        super().__init__(max_tokens, seed, num_workers, max_examples=max_examples)
        self._pairs, self._dataset_sizes = pairs, list(dataset_sizes)
        self._pairs_per_epoch = [max(1, round(rate * len(pairs))) for rate in rates]  # of each dataset
        self._cached_indices: tuple[int, Ints] | None = None  # of the epoch requested last

    def epoch_indices(self, epoch: int) -> Ints:
        """Return the indices into `pairs` of an epoch."""
        cached_indices = self._cached_indices
        if cached_indices is None or cached_indices[0] != epoch:
            starts = np.cumsum(self._dataset_sizes) - self._dataset_sizes
            index_arrays = [start + self._dataset_indices(number, epoch) for number, start in enumerate(starts)]
            self._cached_indices = cached_indices = epoch, np.concatenate(index_arrays)
        return cached_indices[1]

    def _dataset_indices(self, dataset_number: int, epoch: int) -> Ints:
        size, count = self._dataset_sizes[dataset_number], self._pairs_per_epoch[dataset_number]
        first, last = epoch * count, (epoch + 1) * count
        pass_numbers = range(first // size, -(-last // size))
        passes = [self._shuffled_dataset(dataset_number, pass_number) for pass_number in pass_numbers]
        return np.concatenate(passes)[first % size :][:count]

    def _shuffled_dataset(self, dataset_number: int, pass_number: int) -> Ints:
        # raw bits, whose stream is the same in every version of numpy (see `plan_epoch`)
        entropy = [self._seed, dataset_number, pass_number, len(self._dataset_sizes)]
        bit_generator = np.random.PCG64(np.random.SeedSequence(entropy))
        return np.argsort(bit_generator.random_raw(self._dataset_sizes[dataset_number]), kind="stable")

    def _lengths(self, epoch: int) -> tuple[Ints, Ints]:
        indices = self.epoch_indices(epoch)
        return self._pairs.source_lengths[indices], self._pairs.target_lengths[indices]

    def _collate(self, epoch: int, indices: Ints) -> PairBatch:
        return self._pairs.gather(self.epoch_indices(epoch)[indices])
