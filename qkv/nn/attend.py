"""The one door to attention: softmax(score(q, k)) v, and the only softmax over keys in the project.

Behind it are kernels that give the same answer: on a GPU one fused call for sequences of one length and variable-length
flash attention for others, SDPA over groups of similar length on a CPU, and the explicit softmax where the weights are
watched or the score is no dot product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from qkv.errors import InputError
from qkv.nn.cache import Keys
from qkv.nn.groups import Plan, joined, padded, plan
from qkv.nn.mask import Causal, Full, Mask
from qkv.nn.ragged import Layout
from qkv.nn.score import Score

# takes the weights [b, H, n, m] of a watched layer, which sequences of the batch they belong to, and the real sizes of
# their queries and keys
Sink = Callable[[Tensor, Sequence[int], Sequence[int], Sequence[int]], None]

# what distance adds to the scores of n queries and m keys that stand at the places 0 … of one sequence: [H, n, m].
# Sequences that share a row may use it as it is: between places of one of them it sees the same distances.
Bias = Callable[[int, int], Tensor]


def attend(
    q: Tensor,  # [Tq, H, query]
    k: Tensor,  # [Tk, H, key]
    v: Tensor,  # [Tk, H, value]
    queries: Layout,
    keys: Layout,
    *,
    score: Score,
    mask: Mask,
    bias: Bias | None = None,
    dropout: float = 0.0,
    sink: Sink | None = None,
    kernel: str | None = None,
) -> Tensor:  # [Tq, H, value]
    """Each query's weighted average of the values of its own sequence; `bias` is what distance adds to a score."""
    if bias is not None and queries is not keys:
        raise InputError("distances are between places of one sequence; they do not go with cross-attention")
    if isinstance(mask, Causal) and queries is not keys and queries.sizes != keys.sizes:
        raise InputError("a causal mask needs as many queries as keys in each sequence")
    prepared = score.prepare(k.transpose(0, 1)).transpose(0, 1)  # [Tk, H, P]
    even, watched = queries.even and keys.even, sink is not None
    name = kernel or choose(q, v, score=score, biased=bias is not None, dropout=dropout, watched=watched, even=even)
    if name == "even":
        return _even(q, prepared, v, queries, keys, score.scale, mask, dropout)
    if name == "varlen":
        return _varlen(q, prepared, v, queries, keys, score.scale, mask)
    groups = plan(queries, keys, grouped=name == "grouped", causal=isinstance(mask, Causal))
    if name == "explicit":
        out: Tensor = _explicit(q, prepared, v, groups, score, mask, bias, dropout, sink)
    else:
        out = _grouped(q, prepared, v, groups, score.scale, mask, bias, dropout)
    return out


def choose(
    q: Tensor, v: Tensor, *, score: Score, dropout: float, watched: bool, biased: bool = False, even: bool = False
) -> str:
    """The fastest kernel that can do what is asked; `even`: queries are all equally long, and keys are."""
    if watched or not score.is_dot:
        return "explicit"
    if q.device.type != "cuda":
        return "grouped"
    half = q.dtype in (torch.bfloat16, torch.float16)
    fits = q.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    exact = torch.are_deterministic_algorithms_enabled()  # flash attention adds gradients in any order
    if not half or not fits or biased or exact:
        return "padded"
    return "even" if even else "padded" if dropout else "varlen"  # the last one drops nothing


def attend_keys(
    q: Tensor,  # [B, H, N, query]
    memory: Keys,
    *,
    score: Score,
    bias: Tensor | None = None,  # [H, N, M]
    dropout: float = 0.0,
    sink: Sink | None = None,
    rows: Sequence[int] | None = None,
) -> Tensor:  # [B, H, N, value]
    """The same for a step of decoding: queries against keys that were prepared before."""
    if score.is_dot and sink is None:
        allowed = _added(bias, memory.allowed)
        return _fused(q, memory.keys, memory.values, allowed, score.scale, dropout)
    scores = score(q, memory.keys) if bias is None else score(q, memory.keys) + bias
    weights = _softmax(scores, memory.allowed)  # [B, H, N, M]
    if sink is not None:
        sink(memory.seen(weights), rows if rows is not None else range(len(q)), [q.shape[2]] * len(q), memory.sizes)
    return F.dropout(weights, dropout) @ memory.values


def _added(bias: Tensor | None, allowed: Tensor | None) -> Tensor | None:
    """What a fused kernel adds to the scores, or the places that it may look at where nothing is added."""
    if bias is None:
        return allowed
    return bias[None] if allowed is None else bias.masked_fill(~allowed, float("-inf"))  # [1 or B, H, N, M]


def _softmax(scores: Tensor, allowed: Tensor | None) -> Tensor:
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    return torch.softmax(scores, dim=-1)


# ---- sequences of similar length, padded together -------------------------------------------------------------------


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _grouped(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float, mask: Mask, bias: Bias | None, dropout: float
) -> Tensor:  # [Tq, H, value]
    causal = isinstance(mask, Causal)
    outputs = []
    for group, gq, gk, gv in padded(q, k, v, plan):
        # behind a causal mask no real query can see padding, which lies behind all of them
        allowed = group.allowed if group.shared or not causal else None
        hidden = causal and not group.shared
        if bias is not None:  # a kernel takes a causal flag or something to add, not both
            places = mask.allowed(group.queries, group.keys, q.device) if hidden else allowed
            allowed, hidden = _added(bias(group.queries, group.keys), places), False
        outputs.append(_fused(gq, gk, gv, allowed, scale, dropout, causal=hidden))
    return joined(outputs, plan)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    score: Score,
    mask: Mask,
    bias: Bias | None,
    dropout: float,
    sink: Sink | None,
) -> Tensor:  # [Tq, H, value]
    ((group, gq, gk, gv),) = padded(q, k, v, plan)
    allowed = group.allowed
    if not isinstance(mask, Full):
        looks = mask.allowed(group.queries, group.keys, q.device)[None, None]  # [1, 1, N, M]
        allowed = looks if allowed is None else allowed & looks
    scores = score(gq, gk) if bias is None else score(gq, gk) + bias(group.queries, group.keys)
    weights = _softmax(scores, allowed)  # [B, H, N, M]
    if sink is not None:
        queries, keys = _sizes(plan.slots_q, group.rows, group.queries), _sizes(plan.slots_k, group.rows, group.keys)
        sink(weights, plan.order, queries, keys)
    return joined([F.dropout(weights, dropout) @ gv], plan)


def _sizes(slots: Tensor, rows: int, longest: int) -> list[int]:
    sizes: list[int] = torch.bincount(slots // longest, minlength=rows).tolist()
    return sizes


# ---- one call for a whole batch, on a GPU ---------------------------------------------------------------------------


def _even(
    q: Tensor, k: Tensor, v: Tensor, queries: Layout, keys: Layout, scale: float, mask: Mask, dropout: float
) -> Tensor:  # [Tq, H, value]
    """Sequences of one length lie as a padded batch does: a view is enough."""
    sides = (q, queries.longest), (k, keys.longest), (v, keys.longest)
    q, k, v = (x.view(-1, n, *x.shape[1:]).transpose(1, 2) for x, n in sides)  # [B, H, N, size]
    causal = isinstance(mask, Causal)
    return _fused(q, k, v, None, scale, dropout, causal).transpose(1, 2).flatten(0, 1)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float, dropout: float, causal: bool = False
) -> Tensor:  # [B, H, N, value]
    """torch's own choice of a kernel, but cuDNN's, which is planned for every new shape in 70 ms, only for lengths that
    somebody chose: those that chance made hardly come again."""
    look = partial(F.scaled_dot_product_attention, attn_mask=allowed, dropout_p=dropout, is_causal=causal, scale=scale)
    if q.device.type != "cuda" or q.shape[2] % _CHOSEN == k.shape[2] % _CHOSEN == 0:
        return look(q, k, v)
    with sdpa_kernel(_UNPLANNED):
        return look(q, k, v)


_CHOSEN = 64
_UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _varlen(q: Tensor, k: Tensor, v: Tensor, queries: Layout, keys: Layout, scale: float, mask: Mask) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if isinstance(mask, Causal) else (-1, -1)
    out = varlen_attn(
        q, k, v, queries.offsets, keys.offsets, queries.reach, keys.reach, scale=scale, window_size=window
    )
    assert isinstance(out, Tensor)
    return out
