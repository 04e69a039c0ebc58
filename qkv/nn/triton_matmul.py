"""Matrix products of a decoding step with up to a few hundred rows; imported only if Triton is installed.

The vendor's library is slow for a width that is no multiple of eight, such as GPT-2's vocabulary, and launches kernels
of its own for bias, activation, split sums and norms. A layer with few outputs is split along its width, so that all
multiprocessors have work; `add_and_norm` adds the sums of the splits up, together with the residual connection.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]  # only on machines with a GPU
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from qkv.nn.triton_launch import gdc_launch_dependents, gdc_wait, launch_options
from qkv.nn.triton_linear import ACTIVATIONS, Norm, activate

MAX_ROWS = 64  # of whole steps; with more, the vendor's library is faster for widths that it likes
_NUM_PROGRAMS = 128  # about one per multiprocessor


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> Tensor:
    """Return activation(x weightᵀ + bias).  # [R, K], [N, K] -> [R, N]"""
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, out, 1, activation)
    return out


def partial_sums(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weightᵀ as sums over parts of the width, which `add_and_norm` adds up.  # [R, K], [N, K] -> [S, R, N]"""
    num_tiles = triton.cdiv(len(weight), _block_sizes(x, weight)[1]) * triton.cdiv(len(x), MAX_ROWS)
    num_splits = min(8, 1 << max(0, _NUM_PROGRAMS // num_tiles).bit_length() - 1) if num_tiles < _NUM_PROGRAMS else 1
    sums = torch.empty(num_splits, len(x), len(weight), dtype=torch.float32, device=x.device)
    _launch(x, weight, None, sums, num_splits, None)
    return sums


def _block_sizes(x: Tensor, weight: Tensor) -> tuple[int, int, int, int]:
    """Return rows, outputs and width of a tile, and the stages of its pipeline: the fastest of 12 on an H200."""
    rows = max(16, min(128, triton.next_power_of_2(len(x))))
    narrow = 1 if x.dtype == torch.float32 else 2  # tiles of twice the bytes would not fit
    if len(weight) >= 16384:
        return rows, 128, 32 * narrow, 3
    return rows, 32, 64 * narrow, 5 if rows <= 64 else 3


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, num_splits: int, activation: str | None
) -> None:
    (num_rows, width), num_outputs = x.shape, len(weight)
    block_rows, block_outputs, block_width, stages = _block_sizes(x, weight)
    split_width = triton.cdiv(triton.cdiv(width, num_splits), block_width) * block_width
    # rows vary fastest: programs that read the same weights run at the same time
    _matmul_kernel[(triton.cdiv(num_rows, block_rows), triton.cdiv(num_outputs, block_outputs), num_splits)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        num_rows,
        num_outputs,
        width,
        split_width,
        BLOCK_ROWS=block_rows,
        BLOCK_OUTPUTS=block_outputs,
        BLOCK_WIDTH=block_width,
        HAS_BIAS=bias is not None,
        ACTIVATION=ACTIVATIONS[activation],
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        STAGES=stages,
        num_warps=8 if block_rows > 64 else 4,
        **launch_options(x.device),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _matmul_kernel(  # type: ignore[no-untyped-def]  # Triton reads the annotations
    x,
    weight,
    bias,
    out,
    num_rows,
    num_outputs,
    width,
    split_width,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    m = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    n = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    split = tl.program_id(2)
    is_row = m < num_rows
    is_output = n < num_outputs
    start = split * split_width
    end = tl.minimum(start + split_width, width)
    sums = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], tl.float32)
    for first in tl.range(start, end, BLOCK_WIDTH, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_WIDTH)
        in_width = k < end
        rows = tl.load(x + m[:, None] * width + k[None, :], mask=is_row[:, None] & in_width[None, :], other=0.0)
        offsets = n[None, :].to(tl.int64) * width + k[:, None]
        tile = tl.load(weight + offsets, mask=is_output[None, :] & in_width[:, None], other=0.0)
        sums = tl.dot(rows, tile, sums, input_precision=PRECISION)
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    sums = activate(sums, ACTIVATION)
    target = (split.to(tl.int64) * num_rows + m[:, None]) * num_outputs + n[None, :]
    tl.store(out + target, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def add_and_norm(
    sums: Tensor,  # [S, R, N]
    bias: Tensor | None,  # [N]
    residual: Tensor,  # [R, N]
    norm: Norm | None,
) -> tuple[Tensor, Tensor]:
    """Return residual + sums + bias, and its norm; without a norm, the same twice.  # [R, N], [R, N]"""
    num_splits, num_rows, width = sums.shape
    total = torch.empty_like(residual)
    normed = total if norm is None else torch.empty_like(residual)
    _add_and_norm_kernel[(num_rows,)](
        sums,
        residual if bias is None else bias,
        residual,
        residual if norm is None else norm.weight,
        residual if norm is None or norm.bias is None else norm.bias,
        total,
        normed,
        num_rows,
        width,
        0.0 if norm is None else norm.eps,
        SPLITS=num_splits,
        BLOCK_WIDTH=triton.next_power_of_2(width),
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        IS_CENTERED=norm is not None and norm.centered,
        HAS_NORM_BIAS=norm is not None and norm.bias is not None,
        num_warps=4,
        **launch_options(sums.device),
    )
    return total, normed


@triton.jit  # type: ignore[untyped-decorator]
def _add_and_norm_kernel(  # type: ignore[no-untyped-def]
    sums,
    bias,
    residual,
    norm_weight,
    norm_bias,
    total,
    normed,
    num_rows,
    width,
    eps,
    SPLITS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_CENTERED: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK_WIDTH)
    in_width = k < width
    if HAS_NORM:
        gain = tl.load(norm_weight + k, mask=in_width, other=0.0).to(tl.float32)
    if HAS_NORM_BIAS:
        norm_shift = tl.load(norm_bias + k, mask=in_width, other=0.0).to(tl.float32)
    values = tl.zeros([BLOCK_WIDTH], tl.float32)
    if HAS_BIAS:
        values += tl.load(bias + k, mask=in_width, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    target = row * width + k
    values += tl.load(residual + target, mask=in_width, other=0.0).to(tl.float32)
    for split in tl.static_range(SPLITS):
        values += tl.load(sums + split * num_rows * width + target, mask=in_width, other=0.0)
    tl.store(total + target, values.to(total.dtype.element_ty), mask=in_width)
    if HAS_NORM:
        if IS_CENTERED:
            values = tl.where(in_width, values - tl.sum(values, 0) / width, 0.0)
        values = values * tl.rsqrt(tl.sum(values * values, 0) / width + eps) * gain
        if HAS_NORM_BIAS:
            values += norm_shift
        tl.store(normed + target, values.to(normed.dtype.element_ty), mask=in_width)
