"""The one door to attention: softmax(score(q, k)) v, and the only softmax over keys in the project.

Behind it are kernels that give the same answer: variable-length flash attention on a GPU, SDPA over groups of similar
length on a CPU, and the explicit softmax where the weights are watched or the score is no dot product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv.nn.cache import Keys
from qkv.nn.mask import Causal, Full, Mask
from qkv.nn.ragged import Layout
from qkv.nn.score import Score


class Sink(Protocol):
    """Takes the weights of a watched layer; rows says which sequences of the batch they belong to."""

    def __call__(self, weights: Tensor, rows: Sequence[int], queries: Sequence[int], keys: Sequence[int]) -> None: ...


def attend(
    q: Tensor,  # [Tq, H, query]
    k: Tensor,  # [Tk, H, key]
    v: Tensor,  # [Tk, H, value]
    queries: Layout,
    keys: Layout,
    *,
    score: Score,
    mask: Mask,
    dropout: float = 0.0,
    sink: Sink | None = None,
    kernel: str | None = None,
) -> Tensor:  # [Tq, H, value]
    """Each query's weighted average of the values of its own sequence."""
    prepared = score.prepare(k.transpose(0, 1)).transpose(0, 1)  # [Tk, H, P]
    name = kernel or choose(q, v, score=score, dropout=dropout, watched=sink is not None)
    if name == "varlen":
        return _varlen(q, prepared, v, queries, keys, score.scale, mask)
    plan = _plan(queries, keys, waste=_WASTE if name == "grouped" else None)
    if name == "explicit":
        return _explicit(q, prepared, v, plan, score, mask, dropout, sink)
    return _grouped(q, prepared, v, plan, score.scale, mask, dropout)


def choose(q: Tensor, v: Tensor, *, score: Score, dropout: float, watched: bool) -> str:
    """The fastest kernel that can do what is asked."""
    if watched or not score.is_dot:
        return "explicit"
    if q.device.type != "cuda":
        return "grouped"
    half = q.dtype in (torch.bfloat16, torch.float16)
    fits = q.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    exact = torch.are_deterministic_algorithms_enabled()  # flash attention adds gradients in any order
    return "varlen" if half and fits and not dropout and not exact else "padded"


def attend_keys(
    q: Tensor,  # [B, H, N, query]
    memory: Keys,
    *,
    score: Score,
    dropout: float = 0.0,
    sink: Sink | None = None,
    rows: Sequence[int] | None = None,
) -> Tensor:  # [B, H, N, value]
    """The same for a step of decoding: queries against keys that were prepared before."""
    if score.is_dot and sink is None:
        return F.scaled_dot_product_attention(
            q, memory.keys, memory.values, attn_mask=memory.allowed, dropout_p=dropout, scale=score.scale
        )
    weights = _softmax(score(q, memory.keys), memory.allowed)  # [B, H, N, M]
    if sink is not None:
        sink(weights, rows if rows is not None else range(len(q)), [q.shape[2]] * len(q), memory.sizes)
    return F.dropout(weights, dropout) @ memory.values


def _softmax(scores: Tensor, allowed: Tensor | None) -> Tensor:
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    return torch.softmax(scores, dim=-1)


# ---- sequences of similar length, padded together -------------------------------------------------------------------

_WASTE = 0.25  # how much of a group's score matrix may be padding before a group of its own pays
_SMALL = 16384  # entries of a score matrix under which another call costs more than the padding


@dataclass
class Group:
    """Sequences that one call takes together."""

    rows: int
    queries: int  # longest
    keys: int
    allowed: Tensor | None  # [rows, 1, 1, keys]; None: every key is real


@dataclass
class Plan:
    """How packed tokens go into padded groups and come back."""

    groups: list[Group]
    order: list[int]  # sequences in the order of the groups
    take_q: Tensor | None  # [slots] token that fills each slot (any token where it is padding); None: as packed
    take_k: Tensor | None
    slots_q: Tensor  # [Tq] slot of each token
    slots_k: Tensor


def _plan(queries: Layout, keys: Layout, waste: float | None) -> Plan:
    """Worked out once a pair of layouts and kept with it; `waste` None puts all sequences into one group."""
    name = ("plan", id(keys), waste)
    if name not in queries.plans:
        order = list(range(len(queries)))
        cuts = [len(order)]
        if waste is not None:
            order.sort(key=lambda i: (keys.sizes[i], queries.sizes[i]))
            cuts = _cut([queries.sizes[i] for i in order], [keys.sizes[i] for i in order], waste)
        # holding `keys` keeps its id from being used again
        queries.plans[name] = (_place(queries, keys, order, cuts), keys)
    plan: Plan = queries.plans[name][0]
    return plan


def _cut(q: list[int], k: list[int], waste: float) -> list[int]:
    """Ends of the groups: each grows until its padding costs more than a call of its own."""
    ends, begin, real, widest = [], 0, 0, 0
    for i, (queries, keys) in enumerate(zip(q, k, strict=True)):  # keys do not fall: the newest are the longest
        real, widest = real + queries * keys, max(widest, queries)
        padding = (i + 1 - begin) * widest * keys - real
        if padding > max(waste * real, _SMALL):
            ends.append(i)
            begin, real, widest = i, queries * keys, queries
    return [*ends, len(q)]


def _place(queries: Layout, keys: Layout, order: list[int], cuts: list[int]) -> Plan:
    groups, begin = [], 0
    for end in cuts:
        k = [keys.sizes[i] for i in order[begin:end]]
        longest = max(k)
        allowed = None
        if min(k) < longest:
            lengths = torch.tensor(k)
            allowed = (torch.arange(longest) < lengths[:, None])[:, None, None].to(keys.device)
        n = max(queries.sizes[i] for i in order[begin:end])
        groups.append(Group(end - begin, n, longest, allowed))
        begin = end
    take_q, slots_q = _slots(queries, order, [(g.rows, g.queries) for g in groups])
    take_k, slots_k = _slots(keys, order, [(g.rows, g.keys) for g in groups])
    return Plan(groups, order, take_q, take_k, slots_q, slots_k)


def _slots(layout: Layout, order: list[int], shapes: list[tuple[int, int]]) -> tuple[Tensor | None, Tensor]:
    widths = torch.tensor([n for rows, n in shapes for _ in range(rows)])  # slots of each sequence, in group order
    first = torch.empty(len(order), dtype=torch.long)
    first[torch.tensor(order)] = widths.cumsum(0) - widths  # first slot of each sequence, in packed order
    lengths = torch.tensor(layout.sizes)
    slots = first.repeat_interleave(lengths) + layout.positions.cpu()
    total = int(widths.sum())
    if total == layout.total and torch.equal(slots, torch.arange(total)):
        return None, slots.to(layout.device)
    take = torch.zeros(total, dtype=torch.long)
    take[slots] = torch.arange(layout.total)
    return take.to(layout.device), slots.to(layout.device)


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


def _padded_groups(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> list[tuple[Group, Tensor, Tensor, Tensor]]:
    """Each group with its q, k and v as [rows, H, longest, size]."""
    by_query, by_key = [(g.rows, g.queries) for g in plan.groups], [(g.rows, g.keys) for g in plan.groups]
    qs = _by_group(_pad(q, plan.take_q, plan.slots_q), by_query)
    ks = _by_group(_pad(k, plan.take_k, plan.slots_k), by_key)
    vs = _by_group(_pad(v, plan.take_k, plan.slots_k), by_key)
    return list(zip(plan.groups, qs, ks, vs, strict=True))


def _joined(outputs: list[Tensor], plan: Plan) -> Tensor:
    flat = [o.transpose(1, 2).flatten(0, 1) for o in outputs]  # [slots, H, value]
    return _unpad(flat[0] if len(flat) == 1 else torch.cat(flat), plan)


def _grouped(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float, mask: Mask, dropout: float
) -> Tensor:  # [Tq, H, value]
    causal = isinstance(mask, Causal)
    outputs = [
        F.scaled_dot_product_attention(
            gq,
            gk,
            gv,
            # behind a causal mask no real query can see padding, which lies behind all of them
            attn_mask=None if causal else group.allowed,
            is_causal=causal,
            dropout_p=dropout,
            scale=scale,
        )
        for group, gq, gk, gv in _padded_groups(q, k, v, plan)
    ]
    return _joined(outputs, plan)


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, score: Score, mask: Mask, dropout: float, sink: Sink | None
) -> Tensor:  # [Tq, H, value]
    ((group, gq, gk, gv),) = _padded_groups(q, k, v, plan)
    allowed = group.allowed
    if not isinstance(mask, Full):
        looks = mask.allowed(group.queries, group.keys, q.device)[None, None]  # [1, 1, N, M]
        allowed = looks if allowed is None else allowed & looks
    weights = _softmax(score(gq, gk), allowed)  # [B, H, N, M]
    if sink is not None:
        queries, keys = _sizes(plan.slots_q, group.rows, group.queries), _sizes(plan.slots_k, group.rows, group.keys)
        sink(weights, plan.order, queries, keys)
    return _joined([F.dropout(weights, dropout) @ gv], plan)


def _sizes(slots: Tensor, rows: int, longest: int) -> list[int]:
    sizes: list[int] = torch.bincount(slots // longest, minlength=rows).tolist()
    return sizes


# ---- one call for all lengths, on a GPU -----------------------------------------------------------------------------


def _varlen(q: Tensor, k: Tensor, v: Tensor, queries: Layout, keys: Layout, scale: float, mask: Mask) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if isinstance(mask, Causal) else (-1, -1)
    out = varlen_attn(
        q, k, v, queries.offsets, keys.offsets, queries.longest, keys.longest, scale=scale, window_size=window
    )
    assert isinstance(out, Tensor)
    return out
