"""Batches of token ids without padding, limited by tokens or by examples, in an order given by seed and epoch."""

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

BUCKET_POOL = 2**14  # pairs sorted by length together: enough for batches of similar length, in random order


@dataclass(frozen=True, slots=True)
class DataPosition:
    """The next batch of the training data, as a checkpoint stores it."""

    epoch: int
    batch_index: int


@dataclass(frozen=True, slots=True, eq=False)  # tensors have no single truth value to compare by
class PairBatch:
    """B pairs as concatenated ids with lengths, without padding and without BOS and EOS tokens."""

    source: torch.Tensor  # [S] int64
    source_lengths: torch.Tensor  # [B] int64
    target: torch.Tensor  # [T] int64
    target_lengths: torch.Tensor  # [B] int64

    def __len__(self) -> int:
        return self.source_lengths.shape[0]

    @property
    def tokens(self) -> int:
        """Number of tokens of both sides; taken from the shapes, so it never waits for the device."""
        return self.source.shape[0] + self.target.shape[0]

    def to(self, device: torch.device | str) -> PairBatch:
        """Return the batch on a device."""
        fields = (self.source, self.source_lengths, self.target, self.target_lengths)
        return PairBatch(*(field.to(device, non_blocking=True) for field in fields))

    def split(self, num_microbatches: int) -> list[PairBatch]:
        """Split into at most `num_microbatches` consecutive, nonempty batches of similar token count."""
        if num_microbatches < 1:
            raise InputError(f"a batch cannot be split into {num_microbatches} micro-batches; use 1 or more")
        num_microbatches = min(num_microbatches, len(self))
        if num_microbatches <= 1:
            return [self]
        edges = balanced_split((self.source_lengths + self.target_lengths).cumsum(0).tolist(), num_microbatches)
        pair_counts = [last - first for first, last in itertools.pairwise(edges)]
        source_lengths, target_lengths = (
            torch.split(x, pair_counts) for x in (self.source_lengths, self.target_lengths)
        )
        sources = torch.split(self.source, [int(lengths.sum()) for lengths in source_lengths])
        targets = torch.split(self.target, [int(lengths.sum()) for lengths in target_lengths])
        return [PairBatch(*fields) for fields in zip(sources, source_lengths, targets, target_lengths, strict=True)]


def balanced_split(ends: list[int], num_splits: int) -> list[int]:
    """Return the edges of `num_splits` nonempty groups of similar token count; `ends` are cumulative token counts."""
    edges = [0]
    for split in range(1, num_splits):
        ideal = ends[-1] * split / num_splits
        split_point = bisect.bisect_left(ends, ideal)  # this item contains the ideal edge: split before or after it
        tokens_before = ends[split_point - 1] if split_point else 0
        split_point += ends[split_point] - ideal < ideal - tokens_before
        edges.append(min(max(split_point, edges[-1] + 1), len(ends) - (num_splits - split)))
    return [*edges, len(ends)]


class _FlatSequences:
    """Many short sequences of ids in one array: 4 bytes per id; a list of lists takes about 40."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.lengths: Ints = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
        self._starts = np.cumsum(self.lengths) - self.lengths
        flat = itertools.chain.from_iterable(sequences)
        self._ids = np.fromiter(flat, dtype=np.int32, count=int(self.lengths.sum()))

    def to_bytes(self) -> bytes:
        """Return lengths and ids as bytes, for hashing."""
        return self.lengths.tobytes() + self._ids.tobytes()

    def gather(self, indices: Ints) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the selected sequences, concatenated [tokens], and their lengths [selected]."""
        lengths = self.lengths[indices]
        ends = np.cumsum(lengths)
        # offset from a position in the result to the position in the store
        shift = np.repeat(self._starts[indices] - (ends - lengths), lengths)
        ids = self._ids[np.arange(len(shift)) + shift].astype(np.int64)
        return torch.from_numpy(ids), torch.from_numpy(lengths)


class EncodedPairs:
    """All pairs of a dataset as ids, in flat arrays."""

    def __init__(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> None:
        if len(sources) != len(targets):
            raise InputError(f"{len(sources)} sources and {len(targets)} targets; give one target for each source")
        self._sources, self._targets = _FlatSequences(sources), _FlatSequences(targets)
        empty = np.flatnonzero(self._sources.lengths == 0)
        if len(empty):
            raise InputError(f"pair {int(empty[0]) + 1}: the source has no tokens; remove the pair or fill it in")

    def __len__(self) -> int:
        return len(self._sources.lengths)

    @property
    def source_lengths(self) -> Ints:
        """Number of tokens of each source [pairs]."""
        return self._sources.lengths

    @property
    def target_lengths(self) -> Ints:
        """Number of tokens of each target [pairs], without BOS and EOS."""
        return self._targets.lengths

    def fingerprint(self) -> str:
        """Return a hash of all pairs in their order."""
        return hashlib.blake2b(self._sources.to_bytes() + self._targets.to_bytes(), digest_size=16).hexdigest()

    def gather(self, indices: Ints) -> PairBatch:
        """Return the pairs of the given indices, in that order."""
        return PairBatch(*self._sources.gather(indices), *self._targets.gather(indices))


def plan_epoch(
    source_lengths: Ints,
    target_lengths: Ints,
    *,
    max_tokens: int | None,
    seed: int,
    epoch: int,
    bucket_pool: int = BUCKET_POOL,
    max_examples: int | None = None,
) -> list[Ints]:
    """Return the indices of the pairs in each batch of one epoch, every pair once.

    A batch has at most `max_tokens` tokens and at most `max_examples` pairs; None: any number.

    Pairs are shuffled, sorted by length within pools of at most `bucket_pool`, divided into batches, and the batches
    are shuffled. The plan depends on the arguments only. It uses raw bits, because numpy guarantees the stream of a bit
    generator across versions, but not that of `Generator.permutation`, and a checkpoint may be resumed with another
    version.
    """
    sources, targets = np.asarray(source_lengths, dtype=np.int64), np.asarray(target_lengths, dtype=np.int64)
    token_counts = sources + targets
    _check_plan(token_counts, max_tokens, seed, bucket_pool)
    bit_generator = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    shuffled = np.argsort(bit_generator.random_raw(len(token_counts)), kind="stable")
    # at most a quarter of the pairs per pool: a single pool would give the same batches in every epoch
    bucket_ids = np.arange(len(token_counts)) // min(bucket_pool, -(-len(token_counts) // 4))
    order = shuffled[np.lexsort((targets[shuffled], sources[shuffled], bucket_ids))]
    batches = _pack_batches(order, token_counts, max_tokens, max_examples)
    return [batches[index] for index in np.argsort(bit_generator.random_raw(len(batches)), kind="stable")]


def _check_plan(token_counts: Ints, max_tokens: int | None, seed: int, bucket_pool: int) -> None:
    if not len(token_counts):
        raise InputError("no pairs to train on; give at least one")
    if seed < 0:
        raise InputError(f"the seed is {seed}; set seed to 0 or more")
    if bucket_pool < 1:
        raise InputError(f"bucket_pool is {bucket_pool}; use 1 or more")
    if max_tokens is not None and token_counts.max() > max_tokens:
        max_pair_tokens = int(token_counts.max())
        number = int(token_counts.argmax()) + 1
        raise InputError(
            f"pair {number} has {max_pair_tokens} tokens, source and target together, but a batch {max_tokens}; "
            f"set train.batch_tokens to {max_pair_tokens} or more, or remove long pairs"
        )


def evaluation_batches(lengths: Ints, max_tokens: int) -> list[Ints]:
    """Return the indices of batches for evaluation: shortest first, at most `max_tokens` each, a longer item alone."""
    lengths = np.asarray(lengths, dtype=np.int64)
    return _pack_batches(np.argsort(lengths, kind="stable"), lengths, max_tokens)


def _pack_batches(
    order: Ints, token_counts: Ints, max_tokens: int | None, max_examples: int | None = None
) -> list[Ints]:
    """Fill batches in order, each up to the limits of tokens and of items but with at least one item."""
    ends = np.cumsum(token_counts[order]).tolist()
    max_tokens = ends[-1] if max_tokens is None and ends else max_tokens or 0
    max_examples = max_examples or len(ends)
    batches: list[Ints] = []
    first, tokens_used = 0, 0
    while first < len(ends):
        last = max(first + 1, bisect.bisect_right(ends, tokens_used + max_tokens, lo=first))
        last = min(last, first + max_examples)
        batches.append(order[first:last])
        first, tokens_used = last, ends[last - 1]
    return batches


class ResumableBatches(ABC, Generic[Item]):
    """Infinite, resumable iterator over training batches. Subclasses define how a batch is built."""

    def __init__(
        self,
        max_tokens: int | None,
        seed: int,
        num_workers: int = 0,
        bucket_pool: int = BUCKET_POOL,
        max_examples: int | None = None,
    ) -> None:
        self._max_tokens, self._max_examples = max_tokens, max_examples
        self._seed = seed
        self._num_workers = num_workers
        self._bucket_pool = bucket_pool
        self._cached_plan: tuple[int, list[Ints]] | None = None  # of the epoch requested last

    @abstractmethod
    def _lengths(self, epoch: int) -> tuple[Ints, Ints]:
        """Return the number of source and of target tokens of each example."""

    @abstractmethod
    def _collate(self, epoch: int, indices: Ints) -> Item:
        """Build the batch of the given examples; called from several threads."""

    def batches_per_epoch(self, epoch: int) -> int:
        """Return the number of batches of an epoch."""
        return len(self._epoch_plan(epoch))

    def iterate_from(self, epoch: int, batch_index: int) -> Iterator[tuple[DataPosition, Item]]:
        """Yield the batches from `batch_index` of `epoch` on, each with the position after it, from which to resume.

        With workers, threads build batches ahead of time; the batches and their order stay the same.
        """
        if epoch < 0 or not 0 <= batch_index <= self.batches_per_epoch(epoch):
            detail = f"this data has {self.batches_per_epoch(max(epoch, 0))} batches per epoch"
            raise InputError(
                f"batch {batch_index} of epoch {epoch} does not exist ({detail}); "
                "resume with the data, batch size and seed of the checkpoint"
            )
        return prefetch_map(self._load_batch, self._planned_batches(epoch, batch_index), self._num_workers, "batches")

    def _load_batch(self, planned_batch: tuple[DataPosition, int, Ints]) -> tuple[DataPosition, Item]:
        position, epoch, indices = planned_batch
        return position, self._collate(epoch, indices)

    def _planned_batches(self, epoch: int, batch_index: int) -> Iterator[tuple[DataPosition, int, Ints]]:
        for current_epoch in itertools.count(epoch):
            plan = self._epoch_plan(current_epoch)
            for current_index in range(batch_index if current_epoch == epoch else 0, len(plan)):
                yield next_position(current_epoch, current_index, len(plan)), current_epoch, plan[current_index]

    def _epoch_plan(self, epoch: int) -> list[Ints]:
        cached_plan = self._cached_plan
        if cached_plan is None or cached_plan[0] != epoch:
            lengths = self._lengths(epoch)
            plan = plan_epoch(
                *lengths,
                max_tokens=self._max_tokens,
                max_examples=self._max_examples,
                seed=self._seed,
                epoch=epoch,
                bucket_pool=self._bucket_pool,
            )
            self._cached_plan = cached_plan = epoch, plan
        return cached_plan[1]


def next_position(epoch: int, batch_index: int, num_batches: int) -> DataPosition:
    """Return the position after a batch of an epoch with `num_batches` batches."""
    return DataPosition(epoch, batch_index + 1) if batch_index + 1 < num_batches else DataPosition(epoch + 1, 0)


class PairBatches(ResumableBatches[PairBatch]):
    """Infinite, resumable iterator over batches of pairs."""

    def __init__(
        self,
        pairs: EncodedPairs,
        max_tokens: int | None,
        seed: int,
        num_workers: int = 0,
        max_examples: int | None = None,
    ) -> None:
        super().__init__(max_tokens, seed, num_workers, max_examples=max_examples)
        self._pairs = pairs

    def _lengths(self, epoch: int) -> tuple[Ints, Ints]:  # noqa: ARG002  # the same in every epoch
        return self._pairs.source_lengths, self._pairs.target_lengths

    def _collate(self, epoch: int, indices: Ints) -> PairBatch:  # noqa: ARG002
        return self._pairs.gather(indices)
