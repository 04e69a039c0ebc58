"""Pairs of ids, packed without padding into batches of a token budget, in an order that seed and epoch alone decide."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from qkv.data.ahead import ahead
from qkv.errors import InputError

Item = TypeVar("Item")
Ints = npt.NDArray[np.int64]

POOL = 2**14  # pairs sorted together: some dozens of batches, so that lengths are alike within each and mixed over all


@dataclass(frozen=True, slots=True)
class Place:
    """The batch that comes next: what a checkpoint keeps of the data."""

    epoch: int
    index: int


@dataclass(frozen=True, slots=True, eq=False)  # tensors have no single truth value to compare by
class Batch:
    """B pairs as two runs of ids with lengths; no padding, no start or end token."""

    source: torch.Tensor  # [S] int64
    source_lengths: torch.Tensor  # [B] int64
    target: torch.Tensor  # [T] int64
    target_lengths: torch.Tensor  # [B] int64

    def __len__(self) -> int:
        return self.source_lengths.shape[0]

    @property
    def tokens(self) -> int:
        """Real tokens of both sides; read off the shapes, so that it never waits for a device."""
        return self.source.shape[0] + self.target.shape[0]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device."""
        fields = (self.source, self.source_lengths, self.target, self.target_lengths)
        return Batch(*(field.to(device, non_blocking=True) for field in fields))

    def split(self, parts: int) -> list[Batch]:
        """Cut into at most `parts` consecutive batches of about equal token count, each of at least one pair."""
        if parts < 1:
            raise InputError(f"a batch cannot be split into {parts} parts; use 1 or more")
        parts = min(parts, len(self))
        if parts <= 1:
            return [self]
        edges = even_edges((self.source_lengths + self.target_lengths).cumsum(0).tolist(), parts)
        sizes = [last - first for first, last in itertools.pairwise(edges)]
        source_lengths, target_lengths = (torch.split(x, sizes) for x in (self.source_lengths, self.target_lengths))
        sources = torch.split(self.source, [int(lengths.sum()) for lengths in source_lengths])
        targets = torch.split(self.target, [int(lengths.sum()) for lengths in target_lengths])
        return [Batch(*fields) for fields in zip(sources, source_lengths, targets, target_lengths, strict=True)]


def even_edges(ends: list[int], parts: int) -> list[int]:
    """Where to cut pairs whose token counts add up to `ends`: each cut as near its even share as whole pairs allow."""
    edges = [0]
    for part in range(1, parts):
        ideal = ends[-1] * part / parts
        cut = bisect.bisect_left(ends, ideal)  # the pair `cut` crosses the ideal place: cut before or after it
        before = ends[cut - 1] if cut else 0
        cut += ends[cut] - ideal < ideal - before
        edges.append(min(max(cut, edges[-1] + 1), len(ends) - (parts - part)))
    return [*edges, len(ends)]


class _Runs:
    """Many short sequences of ids in one array: 4 bytes an id, where a list of lists takes some 40."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.lengths: Ints = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
        self._starts = np.cumsum(self.lengths) - self.lengths
        flat = itertools.chain.from_iterable(sequences)
        self._ids = np.fromiter(flat, dtype=np.int32, count=int(self.lengths.sum()))

    def content(self) -> bytes:
        """Lengths and ids, as they lie in memory."""
        return self.lengths.tobytes() + self._ids.tobytes()

    def take(self, indices: Ints) -> tuple[torch.Tensor, torch.Tensor]:
        """The chosen sequences end to end [tokens], and their lengths [chosen]."""
        lengths = self.lengths[indices]
        ends = np.cumsum(lengths)
        # Position within the result, moved to where its sequence starts in the store.
        shift = np.repeat(self._starts[indices] - (ends - lengths), lengths)
        ids = self._ids[np.arange(len(shift)) + shift].astype(np.int64)
        return torch.from_numpy(ids), torch.from_numpy(lengths)


class EncodedPairs:
    """All pairs of a corpus as ids, stored flat."""

    def __init__(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> None:
        if len(sources) != len(targets):
            raise InputError(f"{len(sources)} sources and {len(targets)} targets; give one target for each source")
        self._sources, self._targets = _Runs(sources), _Runs(targets)
        empty = np.flatnonzero(self._sources.lengths == 0)
        if len(empty):
            raise InputError(f"pair {int(empty[0]) + 1}: its source has no tokens; remove it or fill it in")

    def __len__(self) -> int:
        return len(self._sources.lengths)

    @property
    def source_lengths(self) -> Ints:
        """Tokens of each source [pairs]."""
        return self._sources.lengths

    @property
    def target_lengths(self) -> Ints:
        """Tokens of each target [pairs], start and end not counted."""
        return self._targets.lengths

    def digest(self) -> str:
        """The same for the same pairs in the same order."""
        return hashlib.blake2b(self._sources.content() + self._targets.content(), digest_size=16).hexdigest()

    def take(self, indices: Ints) -> Batch:
        """The chosen pairs, in that order."""
        return Batch(*self._sources.take(indices), *self._targets.take(indices))


def plan_epoch(
    source_lengths: Ints, target_lengths: Ints, *, budget: int, seed: int, epoch: int, pool: int = POOL
) -> list[Ints]:
    """Indices of the pairs of each batch of one epoch: every pair once, at most `budget` tokens a batch.

    Pairs are shuffled, sorted by length within pools of at most `pool`, cut into batches, and the batches shuffled. The
    plan is a function of the arguments alone. Keys are drawn raw, because numpy promises the stream of a bit generator
    for ever but that of `Generator.permutation` only within a version, and a checkpoint may outlive one.
    """
    sources, targets = np.asarray(source_lengths, dtype=np.int64), np.asarray(target_lengths, dtype=np.int64)
    cost = sources + targets
    _check_plan(cost, budget, seed, pool)
    random = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    shuffled = np.argsort(random.random_raw(len(cost)), kind="stable")
    # A quarter at most: one pool of all pairs would sort them alike and make the same batches every epoch.
    pools = np.arange(len(cost)) // min(pool, -(-len(cost) // 4))
    order = shuffled[np.lexsort((targets[shuffled], sources[shuffled], pools))]
    batches = _cut(order, cost, budget)
    return [batches[place] for place in np.argsort(random.random_raw(len(batches)), kind="stable")]


def _check_plan(cost: Ints, budget: int, seed: int, pool: int) -> None:
    if not len(cost):
        raise InputError("no pairs to make batches of; give at least one")
    if seed < 0:
        raise InputError(f"the seed is {seed}; set seed to 0 or more")
    if pool < 1:
        raise InputError(f"the pool is {pool} pairs; use 1 or more")
    if cost.max() > budget:
        longest = int(cost.max())
        number = int(cost.argmax()) + 1
        raise InputError(
            f"pair {number} has {longest} tokens, source and target together, and a batch may hold {budget}; "
            f"set train.batch_tokens to {longest} or more, or remove long pairs"
        )


def evaluation_batches(lengths: Ints, budget: int) -> list[Ints]:
    """Indices in batches for decoding: shortest first, at most `budget` tokens each, a longer one alone."""
    lengths = np.asarray(lengths, dtype=np.int64)
    return _cut(np.argsort(lengths, kind="stable"), lengths, budget)


def _cut(order: Ints, cost: Ints, budget: int) -> list[Ints]:
    """Fill batches in order, each as far as the budget goes but with at least one member."""
    ends = np.cumsum(cost[order]).tolist()
    batches: list[Ints] = []
    first, spent = 0, 0
    while first < len(ends):
        last = max(first + 1, bisect.bisect_right(ends, spent + budget, lo=first))
        batches.append(order[first:last])
        first, spent = last, ends[last - 1]
    return batches


class Endless(ABC, Generic[Item]):
    """An endless run of training batches, which can be entered at any place. What a batch holds, a subclass says."""

    def __init__(self, budget: int, seed: int, workers: int = 0, pool: int = POOL) -> None:
        self._budget = budget
        self._seed = seed
        self._workers = workers
        self._pool = pool
        self._planned: tuple[int, list[Ints]] | None = None  # the last epoch asked for

    @abstractmethod
    def _lengths(self, epoch: int) -> tuple[Ints, Ints]:
        """Tokens of each example on its two sides."""

    @abstractmethod
    def _take(self, epoch: int, indices: Ints) -> Item:
        """The batch of the chosen examples; called from any thread."""

    def in_epoch(self, epoch: int) -> int:
        """Number of batches of an epoch."""
        return len(self._plan(epoch))

    def from_place(self, epoch: int, index: int) -> Iterator[tuple[Place, Item]]:
        """Batches from number `index` of `epoch` on, each with the place after it: enter there to go on.

        With workers, threads gather batches ahead of time; which batches come, and in which order, stays the same.
        """
        if epoch < 0 or not 0 <= index <= self.in_epoch(epoch):
            size = f"this data makes {self.in_epoch(max(epoch, 0))} batches an epoch"
            raise InputError(
                f"batch {index} of epoch {epoch} does not exist ({size}); "
                "resume with the data, train.batch_tokens and seed that the checkpoint was made with"
            )
        return ahead(self._gather, self._places(epoch, index), self._workers, "batches")

    def _gather(self, planned: tuple[Place, int, Ints]) -> tuple[Place, Item]:
        after, epoch, indices = planned
        return after, self._take(epoch, indices)

    def _places(self, epoch: int, index: int) -> Iterator[tuple[Place, int, Ints]]:
        for now in itertools.count(epoch):
            plan = self._plan(now)
            for number in range(index if now == epoch else 0, len(plan)):
                after = Place(now, number + 1) if number + 1 < len(plan) else Place(now + 1, 0)
                yield after, now, plan[number]

    def _plan(self, epoch: int) -> list[Ints]:
        planned = self._planned
        if planned is None or planned[0] != epoch:
            lengths = self._lengths(epoch)
            plan = plan_epoch(*lengths, budget=self._budget, seed=self._seed, epoch=epoch, pool=self._pool)
            self._planned = planned = epoch, plan
        return planned[1]


class Batches(Endless[Batch]):
    """The endless run of batches of pairs."""

    def __init__(self, pairs: EncodedPairs, budget: int, seed: int, workers: int = 0) -> None:
        super().__init__(budget, seed, workers)
        self._pairs = pairs

    def _lengths(self, epoch: int) -> tuple[Ints, Ints]:  # noqa: ARG002  # the same in every epoch
        return self._pairs.source_lengths, self._pairs.target_lengths

    def _take(self, epoch: int, indices: Ints) -> Batch:  # noqa: ARG002
        return self._pairs.take(indices)
