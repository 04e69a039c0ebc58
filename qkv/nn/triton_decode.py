"""Attention of one new token per row to a cache, as one Triton kernel; imported only if Triton is installed.

The kernel writes the new key and value into the cache, reads the length of the cache from the device, and follows the
index table of beam search. A CUDA graph that contains it therefore serves all steps.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]  # only on machines with a GPU
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from qkv.nn.triton_launch import gdc_launch_dependents, gdc_wait, launch_options

_BLOCK_KEYS = 128


def decode_attention(
    q: Tensor,  # [R, H, D]; rows may have any stride
    k: Tensor,  # [R, H, D]
    v: Tensor,  # [R, H, D]
    keys: Tensor,  # [R, H, M, D]
    values: Tensor,  # [R, H, M, D]
    rows: Tensor,  # [R, M] int32
    slot: Tensor,  # [1] int32
    starts: Tensor,  # [R] int32
    bias_by_distance: Tensor | None,  # [H, M]
    scale: float,
) -> Tensor:  # [R, H, D]
    """Append a key and a value per row, and return each query's weighted mean of the values of its row."""
    num_rows, heads, max_length, size = keys.shape
    out = torch.empty(num_rows, heads, size, dtype=q.dtype, device=q.device)
    _decode_kernel[(num_rows, heads)](
        q,
        k,
        v,
        keys,
        values,
        rows,
        slot,
        starts,
        q if bias_by_distance is None else bias_by_distance,
        out,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        heads,
        max_length,
        scale,
        SIZE=size,
        HAS_BIAS=bias_by_distance is not None,
        BLOCK_KEYS=_BLOCK_KEYS,
        BLOCK_SIZE=triton.next_power_of_2(size),
        num_warps=4,
        **launch_options(q.device),
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _decode_kernel(  # type: ignore[no-untyped-def]  # Triton reads the annotations
    q,
    k,
    v,
    keys,
    values,
    rows,
    slot,
    starts,
    bias,
    out,
    q_stride,
    k_stride,
    v_stride,
    heads,
    max_length,
    scale,
    SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    last = tl.load(slot)
    first = tl.load(starts + row)
    d = tl.arange(0, BLOCK_SIZE)
    in_head = d < SIZE
    query = tl.load(q + row * q_stride + head * SIZE + d, mask=in_head, other=0.0).to(tl.float32) * scale
    key = tl.load(k + row * k_stride + head * SIZE + d, mask=in_head, other=0.0)
    value = tl.load(v + row * v_stride + head * SIZE + d, mask=in_head, other=0.0)
    own = ((row * heads + head) * max_length + last) * SIZE + d
    tl.store(keys + own, key, mask=in_head)
    tl.store(values + own, value, mask=in_head)
    max_score = tl.sum(query * key.to(tl.float32))
    if HAS_BIAS:
        max_score += tl.load(bias + head * max_length).to(tl.float32)
    normalizer = 1.0
    mean = value.to(tl.float32)
    for block_start in range((first // BLOCK_KEYS) * BLOCK_KEYS, last, BLOCK_KEYS):
        j = block_start + tl.arange(0, BLOCK_KEYS)
        is_real = (j < last) & (j >= first)
        cache_row = tl.load(rows + row * max_length + j, mask=is_real, other=0).to(tl.int64)
        offsets = ((cache_row * heads + head) * max_length + j)[:, None] * SIZE + d[None, :]
        in_block = is_real[:, None] & in_head[None, :]
        block_keys = tl.load(keys + offsets, mask=in_block, other=0.0)
        block_values = tl.load(values + offsets, mask=in_block, other=0.0)  # requested before the keys are needed
        scores = tl.sum(query[None, :] * block_keys.to(tl.float32), 1)  # [BLOCK_KEYS]
        if HAS_BIAS:
            scores += tl.load(bias + head * max_length + last - j, mask=is_real, other=0.0).to(tl.float32)
        scores = tl.where(is_real, scores, -float("inf"))
        new_max = tl.maximum(max_score, tl.max(scores, 0))
        shrink = tl.exp(max_score - new_max)
        weights = tl.exp(scores - new_max)
        mean = mean * shrink + tl.sum(weights[:, None] * block_values.to(tl.float32), 0)
        normalizer = normalizer * shrink + tl.sum(weights, 0)
        max_score = new_max
    tl.store(out + (row * heads + head) * SIZE + d, (mean / normalizer).to(out.dtype.element_ty), mask=in_head)
