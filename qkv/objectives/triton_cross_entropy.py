"""`chunked_cross_entropy.nll_and_grad` as one Triton kernel; imported only if Triton is installed.

Each row of logits is read from memory once, a second time from the cache, and overwritten by its gradient. The same
operations compiled by torch take twice as long and twice the memory.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]  # only on machines with a GPU
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

_BLOCK, _WARPS = 2048, 4  # the fastest of six settings on an H200


def nll_and_grad_(
    logits: Tensor, bias: Tensor | None, labels: Tensor, outputs: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, and its gradient, which overwrites the logits.  # [m, padded] -> [m], [m, padded]"""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _nll_and_grad_kernel[(len(logits),)](
        logits,
        logits if bias is None else bias,
        labels,
        losses,
        outputs,
        logits.shape[1],
        label_smoothing,
        HAS_BIAS=bias is not None,
        HAS_SMOOTHING=label_smoothing > 0,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return losses, logits


@triton.jit  # type: ignore[untyped-decorator]
def _nll_and_grad_kernel(  # type: ignore[no-untyped-def]  # Triton reads the annotations
    logits,
    bias,
    labels,
    losses,
    outputs,
    padded,
    label_smoothing,
    HAS_BIAS: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_start = logits + row * padded
    label = tl.load(labels + row)
    label_logit = tl.load(row_start + label).to(tl.float32)  # read before the row is overwritten
    if HAS_BIAS:
        label_logit += tl.load(bias + label).to(tl.float32)
    max_logit = -float("inf")
    normalizer = 0.0
    total = 0.0
    for block_start in range(0, outputs, BLOCK):
        columns = block_start + tl.arange(0, BLOCK)
        x = tl.load(row_start + columns, mask=columns < padded, other=0.0).to(
            tl.float32
        )  # an even end: it loads in words
        if HAS_BIAS:
            x += tl.load(bias + columns, mask=columns < outputs, other=0.0).to(tl.float32)
        x = tl.where(columns < outputs, x, -float("inf"))
        new_max = tl.maximum(max_logit, tl.max(x, 0))
        normalizer = normalizer * tl.exp(max_logit - new_max) + tl.sum(tl.exp(x - new_max), 0)
        if HAS_SMOOTHING:
            total += tl.sum(tl.where(columns < outputs, x, 0.0), 0)
        max_logit = new_max
    normalizer = max_logit + tl.log(normalizer)
    tl.store(losses + row, normalizer - (1.0 - label_smoothing) * label_logit - label_smoothing * total / outputs)
    for block_start in range(0, padded, BLOCK):
        columns = block_start + tl.arange(0, BLOCK)
        x = tl.load(row_start + columns, mask=columns < padded, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias + columns, mask=columns < outputs, other=0.0).to(tl.float32)
        x = tl.where(columns < outputs, x, -float("inf"))
        gradient = tl.exp(x - normalizer) - tl.where(columns == label, 1.0 - label_smoothing, 0.0)
        if HAS_SMOOTHING:
            gradient -= tl.where(columns < outputs, label_smoothing / outputs, 0.0)
        tl.store(row_start + columns, gradient.to(logits.dtype.element_ty), mask=columns < padded)
