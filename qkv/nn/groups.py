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

from qkv.nn.ragged import Layout

_WASTE = 0.25  # how much of a group's score matrix may be padding before a group of its own pays
_SMALL = 1024  # entries of a score matrix under which another call costs more than the padding
_ROW = 32  # tokens up to which short sequences share a row: one product of 32 costs less than four of 8


@dataclass
class Group:
    """Rows that one call takes together; a row is a sequence, or several short ones."""

    rows: int
    queries: int  # longest
    keys: int
    allowed: Tensor | None  # [rows, 1, 1 or queries, keys]; None: every key is real
    shared: bool  # some row holds several sequences; `allowed` then says it all, the causal mask too


@dataclass
class Plan:
    """How packed tokens go into padded groups and come back."""

    groups: list[Group]
    order: list[int]  # sequences in the order of the groups
    take_q: Tensor | None  # [slots] token that fills each slot (any token where it is padding); None: as packed
    take_k: Tensor | None
    slots_q: Tensor  # [Tq] slot of each token
    slots_k: Tensor


# plans differ from batch to batch, and a compiler would make a program of each
@torch.compiler.disable  # type: ignore[untyped-decorator]
def plan(queries: Layout, keys: Layout, *, grouped: bool, causal: bool) -> Plan:
    """Worked out once a pair of layouts and kept with it; not `grouped`: one group, and a row a sequence."""
    name = ("plan", id(keys), grouped, causal)
    if name not in queries.plans:
        # holding `keys` keeps its id from being used again; holding itself would keep a layout alive for ever
        queries.plans[name] = (_worked_out(queries, keys, grouped, causal), None if keys is queries else keys)
    found: Plan = queries.plans[name][0]
    return found


def _worked_out(queries: Layout, keys: Layout, grouped: bool, causal: bool) -> Plan:
    """On the host, anew for every batch: hence few loops, and those over plain numbers."""
    order = list(range(len(queries)))
    if grouped:
        order.sort(key=list(zip(keys.sizes, queries.sizes, strict=True)).__getitem__)
    q, k = [queries.sizes[i] for i in order], [keys.sizes[i] for i in order]
    rows = _share(q, k) if grouped else list(range(len(order) + 1))
    wide_q, wide_k = ([sum(n[begin:end]) for begin, end in pairwise(rows)] for n in (q, k))
    cuts = _cut(wide_q, wide_k) if grouped else [0, len(wide_q)]
    side_q = _Side(queries, order, rows, wide_q, cuts)
    side_k = side_q if keys is queries else _Side(keys, order, rows, wide_k, cuts)
    groups, on = [], queries.device
    for i, (begin, end) in enumerate(pairwise(cuts)):
        shared = rows[end] - rows[begin] > end - begin
        allowed = _apart(side_q, side_k, i, causal) if shared else _real(wide_k[begin:end])
        allowed = None if allowed is None else allowed.to(on)
        groups.append(Group(end - begin, side_q.longest[i], side_k.longest[i], allowed, shared))
    take_q, take_k = (None if s.take is None else s.take.to(on) for s in (side_q, side_k))
    return Plan(groups, order, take_q, take_k, side_q.slots.to(on), side_k.slots.to(on))


def _share(q: list[int], k: list[int]) -> list[int]:
    """Where rows begin, and the end: neighbours that are short enough share one."""
    begins, asking, asked = [0], 0, 0
    for i, (queries, keys) in enumerate(zip(q, k, strict=True)):
        asking, asked = asking + queries, asked + keys
        if i > begins[-1] and (asking > _ROW or asked > _ROW):
            begins.append(i)
            asking, asked = queries, keys
    return [*begins, len(q)]


def _cut(q: list[int], k: list[int]) -> list[int]:
    """Where groups begin, and the end: each grows until its padding costs more than a call of its own."""
    begins, real, widest, longest = [0], 0, 0, 0
    for i, (n, m) in enumerate(zip(q, k, strict=True)):
        queries, keys = max(n, _ROW), max(m, _ROW)  # a short row costs as much as one of that length
        real, widest, longest = real + queries * keys, max(widest, queries), max(longest, keys)
        padding = (i + 1 - begins[-1]) * widest * longest - real
        if padding > max(_WASTE * real, _SMALL):
            begins.append(i)
            real, widest, longest = queries * keys, queries, keys
    return [*begins, len(q)]


class _Side:
    """Where the tokens of one layout lie in the padded groups."""

    def __init__(self, layout: Layout, order: list[int], rows: list[int], wide: list[int], cuts: list[int]):
        self.longest = [max(wide[begin:end]) for begin, end in pairwise(cuts)]  # a group each
        self.counts = [end - begin for begin, end in pairwise(cuts)]  # rows of each group
        self.lengths, _, self.positions = layout.host
        sequences, begins = torch.tensor(order), torch.tensor(rows)
        sizes = self.lengths[sequences]  # [B] in the order of the groups
        before = sizes.cumsum(0) - sizes
        width = torch.tensor(self.longest).repeat_interleave(torch.tensor(self.counts))  # [R] slots of each row
        # a sequence lies behind the others of its row: at the row's first slot, and what the row holds before it
        shift = width.cumsum(0) - width - before[begins[:-1]]  # [R]
        first = torch.empty_like(sizes)
        first[sequences] = before + shift.repeat_interleave(begins.diff())  # [B] in packed order
        self.slots = first.repeat_interleave(self.lengths) + self.positions  # [T]
        self.total = sum(n * longest for n, longest in zip(self.counts, self.longest, strict=True))
        tokens = torch.arange(layout.total)
        as_packed = self.total == layout.total and torch.equal(self.slots, tokens)
        self.take = None if as_packed else self._filled(0, tokens)  # [slots]

    def _filled(self, padding: int, values: Tensor) -> Tensor:
        return values.new_full((self.total,), padding).scatter_(0, self.slots, values)

    @cached_property
    def _owners(self) -> tuple[Tensor, Tensor]:
        small = torch.int32  # every query of a row is compared with every key
        sequences = torch.arange(len(self.lengths), dtype=small).repeat_interleave(self.lengths)
        return self._filled(-1, sequences), self._filled(0, self.positions.to(small))

    def owners(self, group: int) -> tuple[Tensor, Tensor]:
        """The sequence of each slot, -1 for padding, and its place there.  # [rows, longest] each"""
        begin = sum(n * longest for n, longest in zip(self.counts[:group], self.longest[:group], strict=True))
        shape = self.counts[group], self.longest[group]
        owner, place = (part[begin : begin + shape[0] * shape[1]].view(shape) for part in self._owners)
        return owner, place


def _apart(queries: _Side, keys: _Side, group: int, causal: bool) -> Tensor:
    """Sequences that share a row see nothing of each other.  # [rows, 1, queries, keys]"""
    (asking, at), (owner, place) = queries.owners(group), keys.owners(group)
    allowed = asking[:, :, None] == owner[:, None]
    if causal:
        allowed &= at[:, :, None] >= place[:, None]
    allowed |= (asking < 0)[:, :, None]  # what padding sees is thrown away, but a softmax over nothing is no number
    return allowed[:, None]


def _real(keys: list[int]) -> Tensor | None:
    longest = max(keys)
    if min(keys) == longest:
        return None
    return (torch.arange(longest) < torch.tensor(keys)[:, None])[:, None, None]  # [rows, 1, 1, keys]


class _Pad(torch.autograd.Function):
    """Tokens into slots. A token has one slot, so the gradient is a plain gather, not a scattered sum."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, take: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return tokens.index_select(0, take)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return gradients[0].index_select(0, slots), None, None


class _Unpad(torch.autograd.Function):
    """Slots back to tokens; what stood in padding gets no gradient."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.rows = padded.shape[0]
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (slots,) = ctx.saved_tensors
        gradient = gradients[0]
        padded = gradient.new_zeros(ctx.rows, *gradient.shape[1:])
        return padded.index_copy_(0, slots, gradient), None


def _pad(tokens: Tensor, take: Tensor | None, slots: Tensor) -> Tensor:
    if take is None:
        return tokens
    padded: Tensor = _Pad.apply(tokens, take, slots)  # type: ignore[no-untyped-call]
    return padded


def _unpad(padded: Tensor, plan: Plan) -> Tensor:
    if plan.take_q is None:
        return padded
    tokens: Tensor = _Unpad.apply(padded, plan.slots_q)  # type: ignore[no-untyped-call]
    return tokens


def _by_group(padded: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor]:
    parts = torch.split(padded, [rows * n for rows, n in shapes])
    return [p.view(rows, n, *p.shape[1:]).transpose(1, 2) for p, (rows, n) in zip(parts, shapes, strict=True)]


def padded(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> list[tuple[Group, Tensor, Tensor, Tensor]]:
    """Each group with its q, k and v as [rows, H, longest, size]."""
    by_query, by_key = [(g.rows, g.queries) for g in plan.groups], [(g.rows, g.keys) for g in plan.groups]
    qs = _by_group(_pad(q, plan.take_q, plan.slots_q), by_query)
    ks = _by_group(_pad(k, plan.take_k, plan.slots_k), by_key)
    vs = _by_group(_pad(v, plan.take_k, plan.slots_k), by_key)
    return list(zip(plan.groups, qs, ks, vs, strict=True))


def joined(outputs: list[Tensor], plan: Plan) -> Tensor:
    flat = [o.transpose(1, 2).flatten(0, 1) for o in outputs]  # [slots, H, value]
    return _unpad(flat[0] if len(flat) == 1 else torch.cat(flat), plan)
