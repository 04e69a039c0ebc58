"""Linear layers of a decoding step with few rows, as one Triton kernel each; imported only if Triton is installed.

With one row, a step reads every weight once and computes next to nothing: time goes to kernel launches and to the
latency of memory. The kernel therefore also normalizes its input, applies bias, activation and residual connection to
its output, and reads its weights before the previous kernel has ended.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found]  # only on machines with a GPU
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from qkv.nn.triton_launch import gdc_launch_dependents, gdc_wait, launch_options

MAX_ROWS = 4  # with more, matrix products are faster
MAX_WIDTH = 16384  # a program holds whole rows of the weights
ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}


class Norm(NamedTuple):
    """Layer norm, or without centering RMS norm."""

    weight: Tensor  # [K]
    bias: Tensor | None  # [K]
    eps: float
    centered: bool


def fused_linear(
    x: Tensor,  # [R, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None,  # [N]
    *,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,  # [R, N]
) -> Tensor:  # [R, N]
    """Return residual + activation(norm(x) weightᵀ + bias)."""
    num_rows, num_outputs, width = len(x), *weight.shape
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    block_width = triton.next_power_of_2(width)
    # the fastest of eight settings on an H200, for the shapes of GPT-2 with 124 million and 1.5 billion parameters
    block_outputs = 8 if block_width <= 4096 else max(1, 16384 // block_width)
    _linear_kernel[(triton.cdiv(num_outputs, block_outputs),)](
        x,
        weight,
        weight if bias is None else bias,
        weight if norm is None else norm.weight,
        weight if norm is None or norm.bias is None else norm.bias,
        x if residual is None else residual,
        out,
        num_outputs,
        width,
        0.0 if norm is None else norm.eps,
        ROWS=num_rows,
        BLOCK_OUTPUTS=block_outputs,
        BLOCK_WIDTH=block_width,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        IS_CENTERED=norm is not None and norm.centered,
        HAS_NORM_BIAS=norm is not None and norm.bias is not None,
        ACTIVATION=ACTIVATIONS[activation],
        HAS_RESIDUAL=residual is not None,
        num_warps=4,
        **launch_options(x.device),
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
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    k = tl.arange(0, BLOCK_WIDTH)
    is_output = n < num_outputs
    in_width = k < width
    offsets = n[:, None].to(tl.int64) * width + k[None, :]
    tile = tl.load(weight + offsets, mask=is_output[:, None] & in_width[None, :], other=0.0)
    if HAS_BIAS:
        shift = tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)
    if HAS_NORM:
        gain = tl.load(norm_weight + k, mask=in_width, other=0.0).to(tl.float32)
    if HAS_NORM_BIAS:
        norm_shift = tl.load(norm_bias + k, mask=in_width, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    for row in tl.static_range(ROWS):
        values = tl.load(x + row * width + k, mask=in_width, other=0.0).to(tl.float32)
        if HAS_NORM:
            if IS_CENTERED:
                values = tl.where(in_width, values - tl.sum(values, 0) / width, 0.0)
            values = values * tl.rsqrt(tl.sum(values * values, 0) / width + eps) * gain
        if HAS_NORM_BIAS:
            values += norm_shift
        sums = tl.sum(values[None, :] * tile.to(tl.float32), 1)
        if HAS_BIAS:
            sums += shift
        sums = activate(sums, ACTIVATION)
        target = row * num_outputs + n
        if HAS_RESIDUAL:
            sums += tl.load(residual + target, mask=is_output, other=0.0).to(tl.float32)
        tl.store(out + target, sums.to(out.dtype.element_ty), mask=is_output)


@triton.jit  # type: ignore[untyped-decorator]
def activate(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Apply the activation of a number in `ACTIVATIONS`."""
    if ACTIVATION == 1:
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == 2:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 3:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x / (1.0 + tl.exp(-2.0 * inner))  # 0.5 (1 + tanh(a)) = 1 / (1 + exp(-2 a))
    elif ACTIVATION == 4:
        x = x / (1.0 + tl.exp(-x))
    return x
