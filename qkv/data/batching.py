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

from qkv.data.prefetch import prefetch_map
from qkv.errors import InputError

Item = TypeVar("Item")
Ints = npt.NDArray[np.int64]

BUCKET_POOL = 2**14  # pairs sorted together: some dozens of batches, so that lengths are alike within each and mixed over all


@dataclass(frozen=True, slots=True)
class DataPosition:
    """The batch that comes next: what a checkpoint keeps of the data."""

    epoch: int
    batch_index: int


@dataclass(frozen=True, slots=True, eq=False)  # tensors have no single truth value to compare by
class PairBatch:
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

    def to(self, device: torch.device | str) -> PairBatch:
        """The same batch on a device."""
        fields = (self.source, self.source_lengths, self.target, self.target_lengths)
        return PairBatch(*(field.to(device, non_blocking=True) for field in fields))

    def split(self, num_microbatches: int) -> list[PairBatch]:
        """Cut into at most `num_microbatches` consecutive batches of about equal token count, each of at least one pair."""
        if num_microbatches < 1:
            raise InputError(f"a batch cannot be split into {num_microbatches} parts; use 1 or more")
        num_microbatches = min(num_microbatches, len(self))
        if num_microbatches <= 1:
            return [self]
        edges = balanced_split((self.source_lengths + self.target_lengths).cumsum(0).tolist(), num_microbatches)
        pair_counts = [last - first for first, last in itertools.pairwise(edges)]
        source_lengths, target_lengths = (torch.split(x, pair_counts) for x in (self.source_lengths, self.target_lengths))
        sources = torch.split(self.source, [int(lengths.sum()) for lengths in source_lengths])
        targets = torch.split(self.target, [int(lengths.sum()) for lengths in target_lengths])
        return [PairBatch(*fields) for fields in zip(sources, source_lengths, targets, target_lengths, strict=True)]


def balanced_split(ends: list[int], num_splits: int) -> list[int]:
    """Where to cut pairs whose token counts add up to `ends`: each cut as near its even share as whole pairs allow."""
    edges = [0]
    for split in range(1, num_splits):
        ideal = ends[-1] * split / num_splits
        split_point = bisect.bisect_left(ends, ideal)  # the pair `split_point` crosses the ideal place: cut before or after it
        tokens_before = ends[split_point - 1] if split_point else 0
        split_point += ends[split_point] - ideal < ideal - tokens_before
        edges.append(min(max(split_point, edges[-1] + 1), len(ends) - (num_splits - split)))
    return [*edges, len(ends)]


class _FlatSequences:
    """Many short sequences of ids in one array: 4 bytes an id, where a list of lists takes some 40."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.lengths: Ints = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
        self._starts = np.cumsum(self.lengths) - self.lengths
        flat = itertools.chain.from_iterable(sequences)
        self._ids = np.fromiter(flat, dtype=np.int32, count=int(self.lengths.sum()))

    def to_bytes(self) -> bytes:
        """Lengths and ids, as they lie in memory."""
        return self.lengths.tobytes() + self._ids.tobytes()

    def gather(self, indices: Ints) -> tuple[torch.Tensor, torch.Tensor]:
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
        self._sources, self._targets = _FlatSequences(sources), _FlatSequences(targets)
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

    def fingerprint(self) -> str:
        """The same for the same pairs in the same order."""
        return hashlib.blake2b(self._sources.to_bytes() + self._targets.to_bytes(), digest_size=16).hexdigest()

    def gather(self, indices: Ints) -> PairBatch:
        """The chosen pairs, in that order."""
        return PairBatch(*self._sources.gather(indices), *self._targets.gather(indices))


def plan_epoch(
    source_lengths: Ints, target_lengths: Ints, *, max_tokens: int, seed: int, epoch: int, bucket_pool: int = BUCKET_POOL
) -> list[Ints]:
    """Indices of the pairs of each batch of one epoch: every pair once, at most `max_tokens` tokens a batch.

    Pairs are shuffled, sorted by length within pools of at most `bucket_pool`, cut into batches, and the batches shuffled. The
    plan is a function of the arguments alone. Keys are drawn raw, because numpy promises the stream of a bit generator
    for ever but that of `Generator.permutation` only within a version, and a checkpoint may outlive one.
    """
    sources, targets = np.asarray(source_lengths, dtype=np.int64), np.asarray(target_lengths, dtype=np.int64)
    token_counts = sources + targets
    _check_plan(token_counts, max_tokens, seed, bucket_pool)
    bit_generator = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    shuffled = np.argsort(bit_generator.random_raw(len(token_counts)), kind="stable")
    # A quarter at most: one pool of all pairs would sort them alike and make the same batches every epoch.
    bucket_ids = np.arange(len(token_counts)) // min(bucket_pool, -(-len(token_counts) // 4))
    order = shuffled[np.lexsort((targets[shuffled], sources[shuffled], bucket_ids))]
    batches = _pack_batches(order, token_counts, max_tokens)
    return [batches[index] for index in np.argsort(bit_generator.random_raw(len(batches)), kind="stable")]


def _check_plan(token_counts: Ints, max_tokens: int, seed: int, bucket_pool: int) -> None:
    if not len(token_counts):
        raise InputError("no pairs to make batches of; give at least one")
    if seed < 0:
        raise InputError(f"the seed is {seed}; set seed to 0 or more")
    if bucket_pool < 1:
        raise InputError(f"the pool is {bucket_pool} pairs; use 1 or more")
    if token_counts.max() > max_tokens:
        max_pair_tokens = int(token_counts.max())
        number = int(token_counts.argmax()) + 1
        raise InputError(
            f"pair {number} has {max_pair_tokens} tokens, source and target together, and a batch may hold {max_tokens}; "
            f"set train.batch_tokens to {max_pair_tokens} or more, or remove long pairs"
        )


def evaluation_batches(lengths: Ints, max_tokens: int) -> list[Ints]:
    """Indices in batches for decoding: shortest first, at most `max_tokens` tokens each, a longer one alone."""
    lengths = np.asarray(lengths, dtype=np.int64)
    return _pack_batches(np.argsort(lengths, kind="stable"), lengths, max_tokens)


def _pack_batches(order: Ints, token_counts: Ints, max_tokens: int) -> list[Ints]:
    """Fill batches in order, each as far as the budget goes but with at least one member."""
    ends = np.cumsum(token_counts[order]).tolist()
    batches: list[Ints] = []
    first, tokens_used = 0, 0
    while first < len(ends):
        last = max(first + 1, bisect.bisect_right(ends, tokens_used + max_tokens, lo=first))
        batches.append(order[first:last])
        first, tokens_used = last, ends[last - 1]
    return batches


class ResumableBatches(ABC, Generic[Item]):
    """An endless run of training batches, which can be entered at any place. What a batch holds, a subclass says."""

    def __init__(self, max_tokens: int, seed: int, num_workers: int = 0, bucket_pool: int = BUCKET_POOL) -> None:
        self._max_tokens = max_tokens
        self._seed = seed
        self._num_workers = num_workers
        self._bucket_pool = bucket_pool
        self._cached_plan: tuple[int, list[Ints]] | None = None  # the last epoch asked for

    @abstractmethod
    def _lengths(self, epoch: int) -> tuple[Ints, Ints]:
        """Tokens of each example on its two sides."""

    @abstractmethod
    def _collate(self, epoch: int, indices: Ints) -> Item:
        """The batch of the chosen examples; called from any thread."""

    def batches_per_epoch(self, epoch: int) -> int:
        """Number of batches of an epoch."""
        return len(self._epoch_plan(epoch))

    def iterate_from(self, epoch: int, batch_index: int) -> Iterator[tuple[DataPosition, Item]]:
        """Batches from number `batch_index` of `epoch` on, each with the place after it: enter there to go on.

        With workers, threads gather batches ahead of time; which batches come, and in which order, stays the same.
        """
        if epoch < 0 or not 0 <= batch_index <= self.batches_per_epoch(epoch):
            detail = f"this data makes {self.batches_per_epoch(max(epoch, 0))} batches an epoch"
            raise InputError(
                f"batch {batch_index} of epoch {epoch} does not exist ({detail}); "
                "resume with the data, train.batch_tokens and seed that the checkpoint was made with"
            )
        return prefetch_map(self._load_batch, self._planned_batches(epoch, batch_index), self._num_workers, "batches")

    def _load_batch(self, planned_batch: tuple[DataPosition, int, Ints]) -> tuple[DataPosition, Item]:
        next_position, epoch, indices = planned_batch
        return next_position, self._collate(epoch, indices)

    def _planned_batches(self, epoch: int, batch_index: int) -> Iterator[tuple[DataPosition, int, Ints]]:
        for current_epoch in itertools.count(epoch):
            plan = self._epoch_plan(current_epoch)
            for current_index in range(batch_index if current_epoch == epoch else 0, len(plan)):
                next_position = DataPosition(current_epoch, current_index + 1) if current_index + 1 < len(plan) else DataPosition(current_epoch + 1, 0)
                yield next_position, current_epoch, plan[current_index]

    def _epoch_plan(self, epoch: int) -> list[Ints]:
        cached_plan = self._cached_plan
        if cached_plan is None or cached_plan[0] != epoch:
            lengths = self._lengths(epoch)
            plan = plan_epoch(*lengths, max_tokens=self._max_tokens, seed=self._seed, epoch=epoch, bucket_pool=self._bucket_pool)
            self._cached_plan = cached_plan = epoch, plan
        return cached_plan[1]


class PairBatches(ResumableBatches[PairBatch]):
    """The endless run of batches of pairs."""

    def __init__(self, pairs: EncodedPairs, max_tokens: int, seed: int, num_workers: int = 0) -> None:
        super().__init__(max_tokens, seed, num_workers)
        self._pairs = pairs

    def _lengths(self, epoch: int) -> tuple[Ints, Ints]:  # noqa: ARG002  # the same in every epoch
        return self._pairs.source_lengths, self._pairs.target_lengths

    def _collate(self, epoch: int, indices: Ints) -> PairBatch:  # noqa: ARG002
        return self._pairs.gather(indices)
