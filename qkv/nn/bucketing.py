"""Packed tokens into padded groups of similar length, and back: what kernels that take padded batches are given.

A group is cut off where its padding would cost more than a call of its own; short sequences share a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from qkv.nn.ragged import BatchLayout

_MAX_PADDING_RATIO = 0.25  # how much of a group's score matrix may be padding before a group of its own pays
_MIN_SPLIT_SCORES = 1024  # entries of a score matrix under which another call costs more than the padding
_MAX_PACKED_LENGTH = 32  # tokens up to which short sequences share a row: one product of 32 costs less than four of 8


@dataclass
class Bucket:
    """Rows that one call takes together; a row is a sequence, or several short ones."""

    num_rows: int
    query_length: int  # longest
    key_length: int
    mask: Tensor | None  # [rows, 1, 1 or queries, keys]; None: every key is real
    packs_sequences: bool  # some row holds several sequences; `mask` then says it all, the causal mask too


@dataclass
class BucketPlan:
    """How packed tokens go into padded groups and come back."""

    buckets: list[Bucket]
    order: list[int]  # sequences in the order of the groups
    gather_q: Tensor | None  # [slots] token that fills each slot (any token where it is padding); None: as packed
    gather_k: Tensor | None
    scatter_q: Tensor  # [Tq] slot of each token
    scatter_k: Tensor


# plans differ from batch to batch, and a compiler would make a program of each
@torch.compiler.disable  # type: ignore[untyped-decorator]
def plan_buckets(query_layout: BatchLayout, key_layout: BatchLayout, *, bucketed: bool, causal: bool) -> BucketPlan:
    """Worked out once a pair of layouts and kept with it; not `bucketed`: one group, and a row a sequence."""
    cache_key = ("bucket_plan", id(key_layout), bucketed, causal)
    if cache_key not in query_layout.plan_cache:
        # holding `key_layout` keeps its id from being used again; holding itself would keep a layout alive for ever
        query_layout.plan_cache[cache_key] = (_compute_plan(query_layout, key_layout, bucketed, causal), None if key_layout is query_layout else key_layout)
    bucket_plan: BucketPlan = query_layout.plan_cache[cache_key][0]
    return bucket_plan


def _compute_plan(query_layout: BatchLayout, key_layout: BatchLayout, bucketed: bool, causal: bool) -> BucketPlan:
    """On the host, anew for every batch: hence few loops, and those over plain numbers."""
    order = list(range(len(query_layout)))
    if bucketed:
        order.sort(key=list(zip(key_layout.lengths_list, query_layout.lengths_list, strict=True)).__getitem__)
    query_lengths, key_lengths = [query_layout.lengths_list[i] for i in order], [key_layout.lengths_list[i] for i in order]
    row_starts = _pack_short(query_lengths, key_lengths) if bucketed else list(range(len(order) + 1))
    row_query_lengths, row_key_lengths = ([sum(n[begin:end]) for begin, end in pairwise(row_starts)] for n in (query_lengths, key_lengths))
    bucket_starts = _split_buckets(row_query_lengths, row_key_lengths) if bucketed else [0, len(row_query_lengths)]
    query_slots = _SlotMap(query_layout, order, row_starts, row_query_lengths, bucket_starts)
    key_slots = query_slots if key_layout is query_layout else _SlotMap(key_layout, order, row_starts, row_key_lengths, bucket_starts)
    buckets, device = [], query_layout.device
    for i, (begin, end) in enumerate(pairwise(bucket_starts)):
        packs_sequences = row_starts[end] - row_starts[begin] > end - begin
        mask = _block_diagonal_mask(query_slots, key_slots, i, causal) if packs_sequences else _valid_mask(row_key_lengths[begin:end])
        mask = None if mask is None else mask.to(device)
        buckets.append(Bucket(end - begin, query_slots.max_lengths[i], key_slots.max_lengths[i], mask, packs_sequences))
    gather_q, gather_k = (None if s.gather_index is None else s.gather_index.to(device) for s in (query_slots, key_slots))
    return BucketPlan(buckets, order, gather_q, gather_k, query_slots.scatter_index.to(device), key_slots.scatter_index.to(device))


def _pack_short(query_lengths: list[int], key_lengths: list[int]) -> list[int]:
    """Where rows begin, and the end: neighbours that are short enough share one."""
    starts, num_queries, num_keys = [0], 0, 0
    for i, (query_length, key_length) in enumerate(zip(query_lengths, key_lengths, strict=True)):
        num_queries, num_keys = num_queries + query_length, num_keys + key_length
        if i > starts[-1] and (num_queries > _MAX_PACKED_LENGTH or num_keys > _MAX_PACKED_LENGTH):
            starts.append(i)
            num_queries, num_keys = query_length, key_length
    return [*starts, len(query_lengths)]


def _split_buckets(query_lengths: list[int], key_lengths: list[int]) -> list[int]:
    """Where groups begin, and the end: each grows until its padding costs more than a call of its own."""
    starts, num_scores, max_queries, max_keys = [0], 0, 0, 0
    for i, (n, m) in enumerate(zip(query_lengths, key_lengths, strict=True)):
        query_length, key_length = max(n, _MAX_PACKED_LENGTH), max(m, _MAX_PACKED_LENGTH)  # a short row costs as much as one of that length
        num_scores, max_queries, max_keys = num_scores + query_length * key_length, max(max_queries, query_length), max(max_keys, key_length)
        padding = (i + 1 - starts[-1]) * max_queries * max_keys - num_scores
        if padding > max(_MAX_PADDING_RATIO * num_scores, _MIN_SPLIT_SCORES):
            starts.append(i)
            num_scores, max_queries, max_keys = query_length * key_length, query_length, key_length
    return [*starts, len(query_lengths)]


class _SlotMap:
    """Where the tokens of one layout lie in the padded groups."""

    def __init__(self, layout: BatchLayout, order: list[int], row_starts: list[int], row_lengths: list[int], bucket_starts: list[int]):
        self.max_lengths = [max(row_lengths[begin:end]) for begin, end in pairwise(bucket_starts)]  # a group each
        self.rows_per_bucket = [end - begin for begin, end in pairwise(bucket_starts)]  # rows of each group
        self.lengths, _, self.positions = layout.host_tensors
        sequences, starts = torch.tensor(order), torch.tensor(row_starts)
        lengths = self.lengths[sequences]  # [B] in the order of the groups
        preceding = lengths.cumsum(0) - lengths
        row_widths = torch.tensor(self.max_lengths).repeat_interleave(torch.tensor(self.rows_per_bucket))  # [R] slots of each row
        # a sequence lies behind the others of its row: at the row's first slot, and what the row holds before it
        shift = row_widths.cumsum(0) - row_widths - preceding[starts[:-1]]  # [R]
        first_slots = torch.empty_like(lengths)
        first_slots[sequences] = preceding + shift.repeat_interleave(starts.diff())  # [B] in packed order
        self.scatter_index = first_slots.repeat_interleave(self.lengths) + self.positions  # [T]
        self.num_slots = sum(n * max_length for n, max_length in zip(self.rows_per_bucket, self.max_lengths, strict=True))
        tokens = torch.arange(layout.num_tokens)
        is_packed_order = self.num_slots == layout.num_tokens and torch.equal(self.scatter_index, tokens)
        self.gather_index = None if is_packed_order else self._fill_slots(0, tokens)  # [slots]

    def _fill_slots(self, fill_value: int, values: Tensor) -> Tensor:
        return values.new_full((self.num_slots,), fill_value).scatter_(0, self.scatter_index, values)

    @cached_property
    def _sequence_ids(self) -> tuple[Tensor, Tensor]:
        dtype = torch.int32  # every query of a row is compared with every key
        sequences = torch.arange(len(self.lengths), dtype=dtype).repeat_interleave(self.lengths)
        return self._fill_slots(-1, sequences), self._fill_slots(0, self.positions.to(dtype))

    def sequence_ids(self, bucket: int) -> tuple[Tensor, Tensor]:
        """The sequence of each slot, -1 for padding, and its place there.  # [rows, longest] each"""
        begin = sum(n * max_length for n, max_length in zip(self.rows_per_bucket[:bucket], self.max_lengths[:bucket], strict=True))
        shape = self.rows_per_bucket[bucket], self.max_lengths[bucket]
        sequences, positions = (tensor[begin : begin + shape[0] * shape[1]].view(shape) for tensor in self._sequence_ids)
        return sequences, positions


def _block_diagonal_mask(query_slots: _SlotMap, key_slots: _SlotMap, bucket: int, causal: bool) -> Tensor:
    """Sequences that share a row see nothing of each other.  # [rows, 1, queries, keys]"""
    (query_sequences, query_positions), (key_sequences, key_positions) = query_slots.sequence_ids(bucket), key_slots.sequence_ids(bucket)
    mask = query_sequences[:, :, None] == key_sequences[:, None]
    if causal:
        mask &= query_positions[:, :, None] >= key_positions[:, None]
    mask |= (query_sequences < 0)[:, :, None]  # what padding sees is thrown away, but a softmax over nothing is no number
    return mask[:, None]


def _valid_mask(key_lengths: list[int]) -> Tensor | None:
    max_length = max(key_lengths)
    if min(key_lengths) == max_length:
        return None
    return (torch.arange(max_length) < torch.tensor(key_lengths)[:, None])[:, None, None]  # [rows, 1, 1, keys]


class _Pad(torch.autograd.Function):
    """Tokens into slots. A token has one slot, so the gradient is a plain gather, not a scattered sum."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, gather_index: Tensor, scatter_index: Tensor) -> Tensor:
        ctx.save_for_backward(scatter_index)
        return tokens.index_select(0, gather_index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (scatter_index,) = ctx.saved_tensors
        return gradients[0].index_select(0, scatter_index), None, None


class _Unpad(torch.autograd.Function):
    """Slots back to tokens; what stood in padding gets no gradient."""

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


def pad_to_buckets(q: Tensor, k: Tensor, v: Tensor, bucket_plan: BucketPlan) -> list[tuple[Bucket, Tensor, Tensor, Tensor]]:
    """Each group with its q, k and v as [rows, H, longest, size]."""
    query_shapes, key_shapes = [(g.num_rows, g.query_length) for g in bucket_plan.buckets], [(g.num_rows, g.key_length) for g in bucket_plan.buckets]
    qs = _split_by_bucket(_pad(q, bucket_plan.gather_q, bucket_plan.scatter_q), query_shapes)
    ks = _split_by_bucket(_pad(k, bucket_plan.gather_k, bucket_plan.scatter_k), key_shapes)
    vs = _split_by_bucket(_pad(v, bucket_plan.gather_k, bucket_plan.scatter_k), key_shapes)
    return list(zip(bucket_plan.buckets, qs, ks, vs, strict=True))


def unpad(outputs: list[Tensor], bucket_plan: BucketPlan) -> Tensor:
    flat = [o.transpose(1, 2).flatten(0, 1) for o in outputs]  # [slots, H, value]
    return _unpad(flat[0] if len(flat) == 1 else torch.cat(flat), bucket_plan)
