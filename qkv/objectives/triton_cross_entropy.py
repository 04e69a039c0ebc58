"""`chunked_cross_entropy.nll_and_grad` as Triton kernels; imported only if Triton is installed.

Each row of logits is read from memory once, then from the cache, and overwritten by its gradient. The same operations
compiled by torch take twice as long and twice the memory. For R-Drop a program handles the two rows of a label.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]  # only on machines with a GPU
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

_BLOCK, _WARPS = 2048, 4  # the fastest of six settings on an H200


def nll_and_grad_(
    logits: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    outputs: int,
    label_smoothing: float,
    rdrop_alpha: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each label, and the gradient, which overwrites the logits.

    # [m or 2 m, padded], [outputs], [m] -> [m], [m or 2 m, padded]
    """
    losses = torch.empty(len(labels), dtype=torch.float32, device=logits.device)
    arguments = logits, logits if bias is None else bias, labels, losses, outputs, logits.shape[1], label_smoothing
    options = {"HAS_BIAS": bias is not None, "HAS_SMOOTHING": label_smoothing > 0, "BLOCK": _BLOCK, "num_warps": _WARPS}
    if rdrop_alpha is None:
        _nll_and_grad_kernel[(len(labels),)](*arguments, **options)
    else:
        _rdrop_kernel[(len(labels),)](*arguments, rdrop_alpha, len(labels), **options)
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
    weight = tl.where(label >= 0, 1.0, 0.0)  # a negative label is ignored
    label = tl.maximum(label, 0)
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
    loss = normalizer - (1.0 - label_smoothing) * label_logit - label_smoothing * total / outputs
    tl.store(losses + row, weight * loss)
    for block_start in range(0, padded, BLOCK):
        columns = block_start + tl.arange(0, BLOCK)
        x = tl.load(row_start + columns, mask=columns < padded, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias + columns, mask=columns < outputs, other=0.0).to(tl.float32)
        x = tl.where(columns < outputs, x, -float("inf"))
        gradient = tl.exp(x - normalizer) - tl.where(columns == label, 1.0 - label_smoothing, 0.0)
        if HAS_SMOOTHING:
            gradient -= tl.where(columns < outputs, label_smoothing / outputs, 0.0)
        tl.store(row_start + columns, (weight * gradient).to(logits.dtype.element_ty), mask=columns < padded)


@triton.jit  # type: ignore[untyped-decorator]
def _load_logits(row_start, bias, columns, outputs, padded, HAS_BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(row_start + columns, mask=columns < padded, other=0.0).to(tl.float32)  # an even end: it loads in words
    if HAS_BIAS:
        x += tl.load(bias + columns, mask=columns < outputs, other=0.0).to(tl.float32)
    return tl.where(columns < outputs, x, -float("inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _rdrop_kernel(  # type: ignore[no-untyped-def]
    logits,
    bias,
    labels,
    losses,
    outputs,
    padded,
    label_smoothing,
    alpha,
    num_labels,
    HAS_BIAS: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p_row = logits + row * padded
    q_row = logits + (row + num_labels) * padded
    label = tl.load(labels + row)
    weight = tl.where(label >= 0, 0.5, 0.0)  # the mean of two passes; a negative label is ignored
    label = tl.maximum(label, 0)
    label_logits = tl.load(p_row + label).to(tl.float32) + tl.load(q_row + label).to(tl.float32)
    if HAS_BIAS:
        label_logits += 2.0 * tl.load(bias + label).to(tl.float32)
    p_max, q_max, p_sum, q_sum, total = -float("inf"), -float("inf"), 0.0, 0.0, 0.0
    for block_start in range(0, outputs, BLOCK):
        columns = block_start + tl.arange(0, BLOCK)
        x = _load_logits(p_row, bias, columns, outputs, padded, HAS_BIAS)
        y = _load_logits(q_row, bias, columns, outputs, padded, HAS_BIAS)
        new_p_max, new_q_max = tl.maximum(p_max, tl.max(x, 0)), tl.maximum(q_max, tl.max(y, 0))
        p_sum = p_sum * tl.exp(p_max - new_p_max) + tl.sum(tl.exp(x - new_p_max), 0)
        q_sum = q_sum * tl.exp(q_max - new_q_max) + tl.sum(tl.exp(y - new_q_max), 0)
        if HAS_SMOOTHING:
            total += tl.sum(tl.where(columns < outputs, x + y, 0.0), 0)
        p_max, q_max = new_p_max, new_q_max
    p_normalizer, q_normalizer = p_max + tl.log(p_sum), q_max + tl.log(q_sum)
    p_divergence, q_divergence = 0.0, 0.0
    for block_start in range(0, outputs, BLOCK):
        columns = block_start + tl.arange(0, BLOCK)
        log_p = _load_logits(p_row, bias, columns, outputs, padded, HAS_BIAS) - p_normalizer
        log_q = _load_logits(q_row, bias, columns, outputs, padded, HAS_BIAS) - q_normalizer
        difference = tl.where(columns < outputs, log_p - log_q, 0.0)
        p_divergence += tl.sum(tl.exp(log_p) * difference, 0)
        q_divergence -= tl.sum(tl.exp(log_q) * difference, 0)
    loss = p_normalizer + q_normalizer - (1.0 - label_smoothing) * label_logits - label_smoothing * total / outputs
    tl.store(losses + row, weight * (loss + 0.5 * alpha * (p_divergence + q_divergence)))
    for block_start in range(0, padded, BLOCK):
        columns = block_start + tl.arange(0, BLOCK)
        log_p = _load_logits(p_row, bias, columns, outputs, padded, HAS_BIAS) - p_normalizer
        log_q = _load_logits(q_row, bias, columns, outputs, padded, HAS_BIAS) - q_normalizer
        difference = tl.where(columns < outputs, log_p - log_q, 0.0)
        p, q = tl.exp(log_p), tl.exp(log_q)
        target = tl.where(columns == label, 1.0 - label_smoothing, 0.0)
        if HAS_SMOOTHING:
            target += tl.where(columns < outputs, label_smoothing / outputs, 0.0)
        p_gradient = p - target + 0.5 * alpha * (p * (difference - p_divergence) + p - q)
        q_gradient = q - target + 0.5 * alpha * (q * (-difference - q_divergence) + q - p)
        tl.store(p_row + columns, (weight * p_gradient).to(logits.dtype.element_ty), mask=columns < padded)
        tl.store(q_row + columns, (weight * q_gradient).to(logits.dtype.element_ty), mask=columns < padded)
