"""Attention of short sequences of varied lengths as one Triton kernel per direction; imported only with Triton.

Flash attention divides a sequence into tiles of 128 tokens, so that a sentence of 15 costs as much as one of 128, and
sums gradients of queries by atomic additions. Up to `MAX_LENGTH` tokens a sequence fits into one tile: a program
computes one head of one sequence, in the backward pass with all three gradients, without intermediate results in
memory and always in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]  # only on machines with a GPU
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

MAX_LENGTH = 64
_TILES = 32, MAX_LENGTH  # few sizes, because the kernels are compiled for each

_SCHEMA = "(Tensor q, Tensor k, Tensor v, Tensor query_offsets, Tensor key_offsets, int tile, float scale, bool causal)"


def short_attention(
    q: Tensor,  # [Tq, H, size]
    k: Tensor,  # [Tk, H, size]
    v: Tensor,  # [Tk, H, size]
    query_offsets: Tensor,  # [B + 1]
    key_offsets: Tensor,  # [B + 1]
    max_length: int,
    scale: float,
    causal: bool,
) -> Tensor:  # [Tq, H, size]
    """Attend within sequences of at most `max_length` queries and keys; a causal mask is aligned to the last key."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    tile = next(tile for tile in _TILES if tile >= max_length)
    out: Tensor = _attention(q, k, v, query_offsets, key_offsets, tile, scale, causal)
    return out


@torch.library.custom_op("qkv::short_attention", mutates_args=(), schema=f"{_SCHEMA} -> Tensor")
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    tile: int,
    scale: float,
    causal: bool,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    offsets = query_offsets, key_offsets
    _forward_kernel[(len(query_offsets) - 1, q.shape[1])](
        *_strided(q), *_strided(k), *_strided(v), *_strided(out), *offsets, scale, **_options(q, tile, causal)
    )
    return out


@torch.library.custom_op(
    "qkv::short_attention_backward",
    mutates_args=(),
    schema=f"{_SCHEMA.replace('(Tensor q', '(Tensor grad, Tensor q')} -> (Tensor, Tensor, Tensor)",
)
def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    tile: int,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    tensors = [argument for x in (q, k, v, grad, *grads) for argument in _strided(x)]
    options = _options(q, tile, causal)
    _backward_kernel[(len(query_offsets) - 1, q.shape[1])](*tensors, query_offsets, key_offsets, scale, **options)
    return grads[0], grads[1], grads[2]


def _strided(x: Tensor) -> tuple[Tensor, int, int]:
    return x, x.stride(0), x.stride(1)


def _options(q: Tensor, tile: int, causal: bool) -> dict[str, Any]:
    size = q.shape[-1]
    return {
        "SIZE": size,
        "SIZE_TILE": max(16, triton.next_power_of_2(size)),
        "TILE": tile,
        "CAUSAL": causal,
        "num_warps": 4 if tile > _TILES[0] else 2,
    }


@_attention.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@_attention_backward.register_fake
def _(_grad: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs[:3])
    return q, k, v


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  # recomputed
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_attention_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


_attention.register_autograd(_gradients, setup_context=_save_inputs)


@triton.jit  # type: ignore[untyped-decorator]
def _tile(x, stride, head_stride, start, length, TILE: tl.constexpr, SIZE_TILE: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.arange(0, TILE)[:, None]
    columns = tl.arange(0, SIZE_TILE)[None]
    pointers = x + (start + rows).to(tl.int64) * stride + tl.program_id(1) * head_stride + columns
    return pointers, (rows < length) & (columns < SIZE)


@triton.jit  # type: ignore[untyped-decorator]
def _weights(q, k, num_queries, num_keys, scale, TILE: tl.constexpr, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return softmax(q k^T); rows after the last query hold anything finite.  # [TILE, TILE]"""
    queries = tl.arange(0, TILE)[:, None]
    keys = tl.arange(0, TILE)[None]
    mask = keys < num_keys
    if CAUSAL:
        mask = mask & ((queries + num_keys - num_queries >= keys) | (queries >= num_queries))
    scores = tl.where(mask, tl.dot(q, tl.trans(k)) * scale, -float("inf"))
    exp_scores = tl.exp(scores - tl.max(scores, 1)[:, None])
    return exp_scores / tl.sum(exp_scores, 1)[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]  # Triton reads the annotations
    q,
    q_stride,
    q_head_stride,
    k,
    k_stride,
    k_head_stride,
    v,
    v_stride,
    v_head_stride,
    out,
    out_stride,
    out_head_stride,
    query_offsets,
    key_offsets,
    scale,
    SIZE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    sequence = tl.program_id(0)
    query_start, key_start = tl.load(query_offsets + sequence), tl.load(key_offsets + sequence)
    num_queries = tl.load(query_offsets + sequence + 1) - query_start
    num_keys = tl.load(key_offsets + sequence + 1) - key_start
    q_at, q_mask = _tile(q, q_stride, q_head_stride, query_start, num_queries, TILE, SIZE_TILE, SIZE)
    k_at, k_mask = _tile(k, k_stride, k_head_stride, key_start, num_keys, TILE, SIZE_TILE, SIZE)
    v_at, _ = _tile(v, v_stride, v_head_stride, key_start, num_keys, TILE, SIZE_TILE, SIZE)
    out_at, _ = _tile(out, out_stride, out_head_stride, query_start, num_queries, TILE, SIZE_TILE, SIZE)
    q_tile, k_tile = tl.load(q_at, mask=q_mask, other=0.0), tl.load(k_at, mask=k_mask, other=0.0)
    v_tile = tl.load(v_at, mask=k_mask, other=0.0)
    weights = _weights(q_tile, k_tile, num_queries, num_keys, scale, TILE, CAUSAL)
    tl.store(out_at, tl.dot(weights.to(v_tile.dtype), v_tile).to(v_tile.dtype), mask=q_mask)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(  # type: ignore[no-untyped-def]
    q,
    q_stride,
    q_head_stride,
    k,
    k_stride,
    k_head_stride,
    v,
    v_stride,
    v_head_stride,
    grad,
    grad_stride,
    grad_head_stride,
    grad_q,
    grad_q_stride,
    grad_q_head_stride,
    grad_k,
    grad_k_stride,
    grad_k_head_stride,
    grad_v,
    grad_v_stride,
    grad_v_head_stride,
    query_offsets,
    key_offsets,
    scale,
    SIZE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    sequence = tl.program_id(0)
    query_start, key_start = tl.load(query_offsets + sequence), tl.load(key_offsets + sequence)
    num_queries = tl.load(query_offsets + sequence + 1) - query_start
    num_keys = tl.load(key_offsets + sequence + 1) - key_start
    q_at, q_mask = _tile(q, q_stride, q_head_stride, query_start, num_queries, TILE, SIZE_TILE, SIZE)
    k_at, k_mask = _tile(k, k_stride, k_head_stride, key_start, num_keys, TILE, SIZE_TILE, SIZE)
    v_at, _ = _tile(v, v_stride, v_head_stride, key_start, num_keys, TILE, SIZE_TILE, SIZE)
    grad_at, _ = _tile(grad, grad_stride, grad_head_stride, query_start, num_queries, TILE, SIZE_TILE, SIZE)
    q_tile, k_tile = tl.load(q_at, mask=q_mask, other=0.0), tl.load(k_at, mask=k_mask, other=0.0)
    v_tile = tl.load(v_at, mask=k_mask, other=0.0)
    grad_tile = tl.load(grad_at, mask=q_mask, other=0.0)  # zero after the last query: such rows add nothing
    weights = _weights(q_tile, k_tile, num_queries, num_keys, scale, TILE, CAUSAL)
    grad_v_tile = tl.dot(tl.trans(weights.to(v_tile.dtype)), grad_tile)
    grad_v_at, _ = _tile(grad_v, grad_v_stride, grad_v_head_stride, key_start, num_keys, TILE, SIZE_TILE, SIZE)
    tl.store(grad_v_at, grad_v_tile.to(v_tile.dtype), mask=k_mask)
    grad_weights = tl.dot(grad_tile, tl.trans(v_tile))
    grad_scores = weights * (grad_weights - tl.sum(weights * grad_weights, 1)[:, None]) * scale
    grad_scores = grad_scores.to(v_tile.dtype)
    grad_q_at, _ = _tile(grad_q, grad_q_stride, grad_q_head_stride, query_start, num_queries, TILE, SIZE_TILE, SIZE)
    tl.store(grad_q_at, tl.dot(grad_scores, k_tile).to(v_tile.dtype), mask=q_mask)
    grad_k_at, _ = _tile(grad_k, grad_k_stride, grad_k_head_stride, key_start, num_keys, TILE, SIZE_TILE, SIZE)
    tl.store(grad_k_at, tl.dot(tl.trans(grad_scores), q_tile).to(v_tile.dtype), mask=k_mask)
