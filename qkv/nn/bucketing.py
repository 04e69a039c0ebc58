"""Conversion of packed tokens into padded buckets of similar length and back, for kernels that take padded batches.

A new bucket begins where padding would cost more than another kernel call; short sequences share a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from qkv.nn.ragged import BatchLayout

_MAX_PADDING_RATIO = 0.25  # padding in a bucket's score matrix above which a bucket of its own is cheaper
_MIN_SPLIT_SCORES = 1024  # entries of a score matrix below which another call costs more than the padding
_MAX_PACKED_LENGTH = 32  # tokens per shared row: one product of 32 costs less than four of 8


@dataclass
class Bucket:
    """Rows that one kernel call processes together; a row holds one sequence, or several short ones."""

    sequences: list[int]  # indices in the batch, in the order of the rows
    query_lengths: list[int]  # real queries of each row
    key_lengths: list[int]
    mask: Tensor | None  # [rows, 1, 1 or queries, keys]; None: no key is padding
    packs_sequences: bool  # some row holds several sequences; `mask` then includes the causal mask
    offset: int  # position of the first query of each row among its keys

    @property
    def num_rows(self) -> int:
        return len(self.query_lengths)

    @cached_property
    def query_length(self) -> int:
        """Padded number of queries per row."""
        return max(self.query_lengths)

    @cached_property
    def key_length(self) -> int:
        """Padded number of keys per row."""
        return max(self.key_lengths)


@dataclass
class BucketPlan:
    """Buckets of a batch, and the index tensors that move tokens into padded slots and back."""

    buckets: list[Bucket]
    gather_q: Tensor | None  # [slots] token in each slot (any token if it is padding); None: the slots are the tokens
    gather_k: Tensor | None
    scatter_q: Tensor  # [Tq] slot of each token
    scatter_k: Tensor


# plans differ between batches, and the compiler would specialize on each
@torch.compiler.disable  # type: ignore[untyped-decorator]
def plan_buckets(
    query_layout: BatchLayout, key_layout: BatchLayout, *, bucketed: bool, causal: bool, aligned: bool = False
) -> BucketPlan:
    """Return the plan for a pair of layouts, which is computed once and cached in the query layout.

    Args:
        query_layout: layout of the queries.
        key_layout: layout of the keys, sequence by sequence.
        bucketed: False puts all sequences into one bucket, one per row.
        causal: include the causal mask in the masks of rows that hold several sequences.
        aligned: queries are the last tokens of their key sequence (self-attention with or without memory), so that
            `Bucket.offset` is the number of preceding keys.
    """
    cache_key = ("bucket_plan", id(key_layout), bucketed, causal, aligned)
    if cache_key not in query_layout.plan_cache:
        if query_layout.is_static or key_layout.is_static:
            plan = _static_plan(query_layout, key_layout)
        else:
            plan = _compute_plan(query_layout, key_layout, bucketed, causal, aligned)
        # a reference to `key_layout` keeps its id from being reused; a reference to itself would be a cycle
        query_layout.plan_cache[cache_key] = (plan, None if key_layout is query_layout else key_layout)
    bucket_plan: BucketPlan = query_layout.plan_cache[cache_key][0]
    return bucket_plan


def _compute_plan(
    query_layout: BatchLayout, key_layout: BatchLayout, bucketed: bool, causal: bool, aligned: bool
) -> BucketPlan:
    """Compute a plan on the host; it runs for every batch, so loops are few and over plain numbers."""
    order = list(range(len(query_layout)))
    if bucketed:
        order.sort(key=list(zip(key_layout.lengths_list, query_layout.lengths_list, strict=True)).__getitem__)
    offsets = _memory_lengths(query_layout, key_layout) if aligned and key_layout is not query_layout else None
    if offsets is not None:
        order.sort(key=offsets.__getitem__)
    query_lengths, key_lengths = ([layout.lengths_list[i] for i in order] for layout in (query_layout, key_layout))
    # with a memory, queries and keys of a second sequence in a row would be displaced differently: no shared rows
    row_starts = (
        _pack_short(query_lengths, key_lengths) if bucketed and offsets is None else list(range(len(order) + 1))
    )
    row_queries, row_keys = (
        [sum(n[begin:end]) for begin, end in pairwise(row_starts)] for n in (query_lengths, key_lengths)
    )
    bucket_starts = _bucket_starts(
        row_queries, row_keys, bucketed, None if offsets is None else [offsets[i] for i in order]
    )
    query_slots = _SlotMap(query_layout, order, row_starts, row_queries, bucket_starts)
    key_slots = (
        query_slots if key_layout is query_layout else _SlotMap(key_layout, order, row_starts, row_keys, bucket_starts)
    )
    buckets, device = [], query_layout.device
    for i, (begin, end) in enumerate(pairwise(bucket_starts)):
        packs_sequences = row_starts[end] - row_starts[begin] > end - begin
        mask = (
            _block_diagonal_mask(query_slots, key_slots, i, causal)
            if packs_sequences
            else _valid_mask(row_keys[begin:end])
        )
        mask = None if mask is None else mask.to(device)
        sequences = order[row_starts[begin] : row_starts[end]]
        offset = 0 if offsets is None else offsets[sequences[0]]
        buckets.append(Bucket(sequences, row_queries[begin:end], row_keys[begin:end], mask, packs_sequences, offset))
    gather_q, gather_k = (
        None if s.gather_index is None else s.gather_index.to(device) for s in (query_slots, key_slots)
    )
    return BucketPlan(
        buckets, gather_q, gather_k, query_slots.scatter_index.to(device), key_slots.scatter_index.to(device)
    )


def _static_plan(query_layout: BatchLayout, key_layout: BatchLayout) -> BucketPlan:
    """Return a plan with one bucket, computed on the device, so that a CUDA graph contains its computation."""
    num_rows, mask = len(query_layout), key_layout.valid_mask()[:, None, None]  # [B, 1, 1, keys]
    query_lengths, key_lengths = ([layout.padded_length] * num_rows for layout in (query_layout, key_layout))
    bucket = Bucket(list(range(num_rows)), query_lengths, key_lengths, mask, packs_sequences=False, offset=0)
    scatter_q, scatter_k = query_layout.padded_index(), key_layout.padded_index()
    gather_q, gather_k = _static_gather_index(query_layout), _static_gather_index(key_layout)
    return BucketPlan([bucket], gather_q, gather_k, scatter_q, scatter_k)


def _static_gather_index(layout: BatchLayout) -> Tensor:
    """Return the token in each slot of the padded batch; a padded slot has any token.  # [B * padded_length]"""
    starts, slots = layout.cu_seqlens[:-1, None], torch.arange(layout.padded_length, device=layout.device)
    return (starts + slots).clamp(max=layout.num_tokens - 1).flatten()


def _memory_lengths(query_layout: BatchLayout, key_layout: BatchLayout) -> list[int] | None:
    """Return the number of keys before the first query of each sequence; None: there are none anywhere."""
    if query_layout.lengths_list == key_layout.lengths_list:
        return None
    return [m - n for n, m in zip(query_layout.lengths_list, key_layout.lengths_list, strict=True)]


def _bucket_starts(
    query_lengths: list[int], key_lengths: list[int], bucketed: bool, offsets: list[int] | None
) -> list[int]:
    """Return the first row of each bucket, and the number of rows; all rows of a bucket have the same offset."""
    num_rows = len(query_lengths)
    changes = [] if offsets is None else [i for i in range(1, num_rows) if offsets[i] != offsets[i - 1]]
    starts = []
    for begin, end in pairwise([0, *changes, num_rows]):
        group_starts = _split_buckets(query_lengths[begin:end], key_lengths[begin:end])[:-1] if bucketed else [0]
        starts += [begin + start for start in group_starts]
    return [*starts, num_rows]


def _pack_short(query_lengths: list[int], key_lengths: list[int]) -> list[int]:
    """Return the first sequence of each row, and the number of sequences; short neighbors share a row."""
    starts, num_queries, num_keys = [0], 0, 0
    for i, (query_length, key_length) in enumerate(zip(query_lengths, key_lengths, strict=True)):
        num_queries, num_keys = num_queries + query_length, num_keys + key_length
        if i > starts[-1] and (num_queries > _MAX_PACKED_LENGTH or num_keys > _MAX_PACKED_LENGTH):
            starts.append(i)
            num_queries, num_keys = query_length, key_length
    return [*starts, len(query_lengths)]


def _split_buckets(query_lengths: list[int], key_lengths: list[int]) -> list[int]:
    """Return the first row of each bucket, and the number of rows.

    A bucket grows until its padding costs more than another kernel call.
    """
    starts, num_scores, max_queries, max_keys = [0], 0, 0, 0
    for i, (n, m) in enumerate(zip(query_lengths, key_lengths, strict=True)):
        # a shorter row costs as much as one of _MAX_PACKED_LENGTH
        query_length, key_length = max(n, _MAX_PACKED_LENGTH), max(m, _MAX_PACKED_LENGTH)
        num_scores += query_length * key_length
        max_queries, max_keys = max(max_queries, query_length), max(max_keys, key_length)
        padding = (i + 1 - starts[-1]) * max_queries * max_keys - num_scores
        if padding > max(_MAX_PADDING_RATIO * num_scores, _MIN_SPLIT_SCORES):
            starts.append(i)
            num_scores, max_queries, max_keys = query_length * key_length, query_length, key_length
    return [*starts, len(query_lengths)]


class _SlotMap:
    """Slots of the tokens of one layout in the padded buckets."""

    def __init__(
        self,
        layout: BatchLayout,
        order: Sequence[int],
        row_starts: Sequence[int],
        row_lengths: list[int],
        bucket_starts: list[int],
    ):
        self.max_lengths = [max(row_lengths[begin:end]) for begin, end in pairwise(bucket_starts)]  # of each bucket
        self.rows_per_bucket = [end - begin for begin, end in pairwise(bucket_starts)]
        self.lengths, _, self.positions = layout.host_tensors
        sequences, starts = torch.tensor(order), torch.tensor(row_starts)
        lengths = self.lengths[sequences]  # [B] in the order of the buckets
        preceding = lengths.cumsum(0) - lengths
        row_widths = torch.tensor(self.max_lengths).repeat_interleave(
            torch.tensor(self.rows_per_bucket)
        )  # [R] slots of each row
        # a sequence begins at its row's first slot plus the tokens of the sequences before it in that row
        shift = row_widths.cumsum(0) - row_widths - preceding[starts[:-1]]  # [R]
        first_slots = torch.empty_like(lengths)
        first_slots[sequences] = preceding + shift.repeat_interleave(starts.diff())  # [B] in packed order
        self.scatter_index = first_slots.repeat_interleave(self.lengths) + self.positions  # [T]
        self.num_slots = sum(
            n * max_length for n, max_length in zip(self.rows_per_bucket, self.max_lengths, strict=True)
        )
        tokens = torch.arange(layout.num_tokens)
        is_packed_order = self.num_slots == layout.num_tokens and torch.equal(self.scatter_index, tokens)
        self.gather_index = None if is_packed_order else self._fill_slots(0, tokens)  # [slots]

    def _fill_slots(self, fill_value: int, values: Tensor) -> Tensor:
        return values.new_full((self.num_slots,), fill_value).scatter_(0, self.scatter_index, values)

    @cached_property
    def _sequence_ids(self) -> tuple[Tensor, Tensor]:
        dtype = torch.int32  # small, because every query of a row is compared with every key
        sequences = torch.arange(len(self.lengths), dtype=dtype).repeat_interleave(self.lengths)
        return self._fill_slots(-1, sequences), self._fill_slots(0, self.positions.to(dtype))

    def sequence_ids(self, bucket: int) -> tuple[Tensor, Tensor]:
        """Return the sequence of each slot, -1 for padding, and its position in it.  # [rows, max_length] each"""
        begin = sum(
            n * max_length
            for n, max_length in zip(self.rows_per_bucket[:bucket], self.max_lengths[:bucket], strict=True)
        )
        shape = self.rows_per_bucket[bucket], self.max_lengths[bucket]
        sequences, positions = (
            tensor[begin : begin + shape[0] * shape[1]].view(shape) for tensor in self._sequence_ids
        )
        return sequences, positions


def _block_diagonal_mask(query_slots: _SlotMap, key_slots: _SlotMap, bucket: int, causal: bool) -> Tensor:
    """Return a mask that separates sequences that share a row.  # [rows, 1, queries, keys]"""
    query_sequences, query_positions = query_slots.sequence_ids(bucket)
    key_sequences, key_positions = key_slots.sequence_ids(bucket)
    mask = query_sequences[:, :, None] == key_sequences[:, None]
    if causal:
        mask &= query_positions[:, :, None] >= key_positions[:, None]
    mask |= (query_sequences < 0)[:, :, None]  # padded queries attend to something: a softmax over nothing is NaN
    return mask[:, None]


def _valid_mask(key_lengths: list[int]) -> Tensor | None:
    max_length = max(key_lengths)
    if min(key_lengths) == max_length:
        return None
    return (torch.arange(max_length) < torch.tensor(key_lengths)[:, None])[:, None, None]  # [rows, 1, 1, keys]


class _Pad(torch.autograd.Function):
    """Move tokens into slots. A token has one slot, so the gradient is a gather instead of a scattered sum."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, gather_index: Tensor, scatter_index: Tensor) -> Tensor:
        ctx.save_for_backward(scatter_index)
        return tokens.index_select(0, gather_index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (scatter_index,) = ctx.saved_tensors
        return gradients[0].index_select(0, scatter_index), None, None


class _Unpad(torch.autograd.Function):
    """Move slots back to tokens; padding gets no gradient."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, scatter_index: Tensor) -> Tensor:
        ctx.save_for_backward(scatter_index)
        ctx.num_rows = padded.shape[0]
        return padded.index_select(0, scatter_index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (scatter_index,) = ctx.saved_tensors
        gradient = gradients[0]
        padded = gradient.new_zeros(ctx.num_rows, *gradient.shape[1:])
        return padded.index_copy_(0, scatter_index, gradient), None


def _pad(tokens: Tensor, gather_index: Tensor | None, scatter_index: Tensor) -> Tensor:
    if gather_index is None:
        return tokens
    padded: Tensor = _Pad.apply(tokens, gather_index, scatter_index)  # type: ignore[no-untyped-call]
    return padded


def _unpad(padded: Tensor, bucket_plan: BucketPlan) -> Tensor:
    if bucket_plan.gather_q is None:
        return padded
    tokens: Tensor = _Unpad.apply(padded, bucket_plan.scatter_q)  # type: ignore[no-untyped-call]
    return tokens


def _split_by_bucket(padded: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor]:
    chunks = torch.split(padded, [rows * n for rows, n in shapes])
    return [p.view(rows, n, *p.shape[1:]).transpose(1, 2) for p, (rows, n) in zip(chunks, shapes, strict=True)]


def pad_to_buckets(
    q: Tensor, k: Tensor, v: Tensor, bucket_plan: BucketPlan
) -> list[tuple[Bucket, Tensor, Tensor, Tensor]]:
    """Return each bucket with its queries, keys and values.  # [rows, H, max_length, size]"""
    query_shapes = [(bucket.num_rows, bucket.query_length) for bucket in bucket_plan.buckets]
    key_shapes = [(bucket.num_rows, bucket.key_length) for bucket in bucket_plan.buckets]
    qs = _split_by_bucket(_pad(q, bucket_plan.gather_q, bucket_plan.scatter_q), query_shapes)
    ks = _split_by_bucket(_pad(k, bucket_plan.gather_k, bucket_plan.scatter_k), key_shapes)
    vs = _split_by_bucket(_pad(v, bucket_plan.gather_k, bucket_plan.scatter_k), key_shapes)
    return list(zip(bucket_plan.buckets, qs, ks, vs, strict=True))


def pad_values(values: Tensor, bucket_plan: BucketPlan, side: Literal["query", "key"], fill_value: int) -> list[Tensor]:
    """Return one value per slot of each bucket, `fill_value` in padded slots.  # [T] -> [rows, max_length] each"""
    is_query = side == "query"
    scatter_index = bucket_plan.scatter_q if is_query else bucket_plan.scatter_k
    shapes = [(b.num_rows, b.query_length if is_query else b.key_length) for b in bucket_plan.buckets]
    sizes = [rows * length for rows, length in shapes]
    slots = values.new_full((sum(sizes),), fill_value).index_copy_(0, scatter_index, values)
    return [chunk.view(shape) for chunk, shape in zip(torch.split(slots, sizes), shapes, strict=True)]


def longest_row(max_length: int) -> int:
    """Return the number of tokens of the longest row of a plan for sequences of at most `max_length` tokens."""
    return max(max_length, _MAX_PACKED_LENGTH)


def unpad(outputs: list[Tensor], bucket_plan: BucketPlan) -> Tensor:
    """Return the outputs of all buckets as packed tokens (the inverse of `pad_to_buckets`).  # [Tq, H, value]"""
    flat = [o.transpose(1, 2).flatten(0, 1) for o in outputs]  # [slots, H, value]
    return _unpad(flat[0] if len(flat) == 1 else torch.cat(flat), bucket_plan)
