"""Several sets of pairs in one run of batches, each as often as its weight says (Raffel et al. 2020, 3.5.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qkv.data.batches import Batch, EncodedPairs, Endless, Ints
from qkv.errors import InputError


def shares(sizes: Sequence[int], weights: Sequence[float | None], temperature: float = 1.0) -> list[float]:
    """How much of an epoch each set gets: by weights, or by sizes to the power of 1 / temperature.

    A temperature of 1 is in proportion to size; the higher it is, the more alike are the shares.
    """
    given = [weight for weight in weights if weight is not None]
    if given and len(given) < len(sizes):
        raise InputError("data.mix: some sets have a weight and some have none; give each one, or none")
    parts = given or [size ** (1 / temperature) for size in sizes]
    return [part / sum(parts) for part in parts]


class MixedBatches(Endless[Batch]):
    """The endless run of batches of several sets, which lie one behind the other in `pairs`.

    An epoch has as many pairs as there are in all. Each set is walked through in an order of its own, drawn anew
    whenever it begins again, and an epoch goes on where the one before it stopped: so every pair of a set is seen
    equally often, and what an epoch holds is a function of the seed and its number alone.
    """

    def __init__(
        self,
        pairs: EncodedPairs,
        sizes: Sequence[int],
        parts: Sequence[float],
        budget: int,
        seed: int,
        workers: int = 0,
    ) -> None:
        super().__init__(budget, seed, workers)
        self._pairs, self._sizes = pairs, list(sizes)
        self._counts = [max(1, round(part * len(pairs))) for part in parts]  # pairs of each set in an epoch
        self._drawn: tuple[int, Ints] | None = None  # the last epoch asked for

    def chosen(self, epoch: int) -> Ints:
        """The pairs of an epoch, by their number in all sets together."""
        drawn = self._drawn
        if drawn is None or drawn[0] != epoch:
            starts = np.cumsum(self._sizes) - self._sizes
            sets = [start + self._of_set(number, epoch) for number, start in enumerate(starts)]
            self._drawn = drawn = epoch, np.concatenate(sets)
        return drawn[1]

    def _of_set(self, number: int, epoch: int) -> Ints:
        size, count = self._sizes[number], self._counts[number]
        first, last = epoch * count, (epoch + 1) * count
        rounds = [self._order(number, which) for which in range(first // size, -(-last // size))]
        return np.concatenate(rounds)[first % size :][:count]

    def _order(self, number: int, which: int) -> Ints:
        # raw draws, as in `plan_epoch`: their stream is the same in every version of numpy
        random = np.random.PCG64(np.random.SeedSequence([self._seed, number, which, len(self._sizes)]))
        return np.argsort(random.random_raw(self._sizes[number]), kind="stable")

    def _lengths(self, epoch: int) -> tuple[Ints, Ints]:
        chosen = self.chosen(epoch)
        return self._pairs.source_lengths[chosen], self._pairs.target_lengths[chosen]

    def _take(self, epoch: int, indices: Ints) -> Batch:
        return self._pairs.take(self.chosen(epoch)[indices])
