"""Linear layers of a decoding step with few rows, as one Triton kernel each; imported only if Triton is installed.

With one row, a step reads every weight once and computes next to nothing: time goes to kernel launches. The kernel
therefore also normalizes its input, and applies bias, activation and residual connection to its output.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found]  # only on machines with a GPU
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

MAX_ROWS = 4  # with more, matrix products of the vendor's library are faster
_ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
_VOCABULARY_BLOCK = 1024


class InputNorm(NamedTuple):
    """Layer norm, or without centering RMS norm, of the input of a linear layer."""

    weight: Tensor  # [K]
    bias: Tensor | None  # [K]
    eps: float
    centered: bool


def fused_linear(
    x: Tensor,  # [R, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None,  # [N]
    *,
    norm: InputNorm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,  # [R, N]
) -> Tensor:  # [R, N]
    """Return residual + activation(norm(x) weightᵀ + bias)."""
    num_rows, num_outputs, width = len(x), *weight.shape
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    # the fastest of 40 settings on an H200, for the shapes of GPT-2 with 124 million and 1.5 billion parameters
    block_outputs = 2 if num_outputs <= 2048 else 4 if num_outputs <= 4096 else 8
    block_width = min(2048, triton.next_power_of_2(width)) if num_outputs <= 2048 else 1024
    _linear_kernel[(triton.cdiv(num_outputs, block_outputs),)](
        x,
        weight,
        weight if bias is None else bias,
        weight if norm is None else norm.weight,
        weight if norm is None or norm.bias is None else norm.bias,
        x if residual is None else residual,
        out,
        num_rows,
        num_outputs,
        width,
        0.0 if norm is None else norm.eps,
        ROWS=triton.next_power_of_2(num_rows),
        BLOCK_OUTPUTS=block_outputs,
        BLOCK_WIDTH=block_width,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        IS_CENTERED=norm is not None and norm.centered,
        HAS_NORM_BIAS=norm is not None and norm.bias is not None,
        ACTIVATION=_ACTIVATIONS[activation],
        HAS_RESIDUAL=residual is not None,
        num_warps=2 if num_outputs > 16384 else 4,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _linear_kernel(  # type: ignore[no-untyped-def]  # Triton reads the annotations
    x,
    weight,
    bias,
    norm_weight,
    norm_bias,
    residual,
    out,
    num_rows,
    num_outputs,
    width,
    eps,
    ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_CENTERED: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    is_output = n < num_outputs
    k_range = tl.arange(0, BLOCK_WIDTH)
    mean = tl.zeros([ROWS], tl.float32)
    scale = tl.zeros([ROWS], tl.float32)
    if HAS_NORM:
        total = tl.zeros([ROWS], tl.float32)
        squares = tl.zeros([ROWS], tl.float32)
        for start in range(0, width, BLOCK_WIDTH):
            k = start + k_range
            mask = is_row[:, None] & (k < width)[None, :]
            block = tl.load(x + rows[:, None] * width + k[None, :], mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(block, 1)
            squares += tl.sum(block * block, 1)
        if IS_CENTERED:
            mean = total / width
        scale = tl.rsqrt(squares / width - mean * mean + eps)
    sums = tl.zeros([ROWS, BLOCK_OUTPUTS], tl.float32)
    for start in range(0, width, BLOCK_WIDTH):
        k = start + k_range
        in_width = k < width
        offsets = n[:, None].to(tl.int64) * width + k[None, :]
        tile = tl.load(weight + offsets, mask=is_output[:, None] & in_width[None, :], other=0.0).to(tl.float32)
        mask = is_row[:, None] & in_width[None, :]
        block = tl.load(x + rows[:, None] * width + k[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_NORM:
            gain = tl.load(norm_weight + k, mask=in_width, other=0.0).to(tl.float32)
            block = (block - mean[:, None]) * scale[:, None] * gain[None, :]
            if HAS_NORM_BIAS:
                block += tl.load(norm_bias + k, mask=in_width, other=0.0).to(tl.float32)[None, :]
        sums += tl.sum(block[:, None, :] * tile[None, :, :], 2)
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION == 1:
        sums = tl.maximum(sums, 0.0)
    elif ACTIVATION == 2:
        sums = 0.5 * sums * (1.0 + tl.erf(sums * 0.7071067811865476))
    elif ACTIVATION == 3:
        inner = 0.7978845608028654 * (sums + 0.044715 * sums * sums * sums)
        sums = sums / (1.0 + tl.exp(-2.0 * inner))  # 0.5 (1 + tanh(a)) = 1 / (1 + exp(-2 a))
    elif ACTIVATION == 4:
        sums = sums / (1.0 + tl.exp(-sums))
    target = rows[:, None] * num_outputs + n[None, :]
    mask = is_row[:, None] & is_output[None, :]
    if HAS_RESIDUAL:
        sums += tl.load(residual + target, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + target, sums.to(out.dtype.element_ty), mask=mask)


def argmax_with_log_prob(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most probable token of each row and its log-probability; each value is read once.  # [R, V] -> [R]"""
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, _VOCABULARY_BLOCK)
    maxima, sums = logits.new_empty(2, num_rows, num_blocks, dtype=torch.float32)
    tokens = torch.empty(num_rows, num_blocks, dtype=torch.long, device=logits.device)
    _block_max_kernel[(num_rows, num_blocks)](
        logits, maxima, sums, tokens, vocab_size, num_blocks, logits.stride(0), BLOCK=_VOCABULARY_BLOCK, num_warps=4
    )
    best = torch.empty(num_rows, dtype=torch.long, device=logits.device)
    log_probs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    _merge_max_kernel[(num_rows,)](
        maxima, sums, tokens, best, log_probs, num_blocks, BLOCK=triton.next_power_of_2(num_blocks), num_warps=1
    )
    return best, log_probs


@triton.jit  # type: ignore[untyped-decorator]
def _block_max_kernel(  # type: ignore[no-untyped-def]
    logits, maxima, sums, tokens, vocab_size, num_blocks, stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + token, mask=token < vocab_size, other=-float("inf")).to(tl.float32)
    maximum = tl.max(values, 0)
    index = row * num_blocks + block
    tl.store(maxima + index, maximum)
    tl.store(sums + index, tl.sum(tl.exp(values - maximum), 0))
    tl.store(tokens + index, (block * BLOCK + tl.argmax(values, 0)).to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _merge_max_kernel(maxima, sums, tokens, best, log_probs, num_blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    is_block = block < num_blocks
    values = tl.load(maxima + row * num_blocks + block, mask=is_block, other=-float("inf"))
    counts = tl.load(sums + row * num_blocks + block, mask=is_block, other=0.0)
    maximum = tl.max(values, 0)
    first = tl.argmax(values, 0)
    tl.store(best + row, tl.load(tokens + row * num_blocks + first))
    tl.store(log_probs + row, -tl.log(tl.sum(counts * tl.exp(values - maximum), 0)))
