"""Cross-entropy over a vocabulary, in chunks of rows on a GPU.

Logits are the largest tensors in training a language model: 16 x 1024 tokens of GPT-2 have 3.3 GB of them in float32,
and softmax and its gradient need several copies. With bfloat16 on a GPU they are therefore computed for a chunk of rows
at a time, overwritten by their gradient and freed; only the gradients of the features and of the output matrix are kept
until the backward pass. The number of matrix products stays the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from shutil import which
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.nn.heads import Head

_MAX_LOGITS = 2**28  # logits per chunk: half a gigabyte; an H200 is no faster with twice or half as many
# Sizes that are multiples of these use whole tiles of a GPU's matrix product; 50,257 outputs take 7 times longer.
_ROW_TILE, _OUTPUT_TILE = 128, 64


def nll(head: Head, features: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the negative log-likelihood of the labels, summed.  # [M, width], [M] -> []

    Args:
        head: the language-model head.
        features: inputs of the head's last layer.
        labels: token ids.
        label_smoothing: fraction of each label that is distributed evenly over the vocabulary (Szegedy et al. 2016).
    """
    under_autocast = features.device.type == "cuda" and torch.is_autocast_enabled("cuda")
    if under_autocast and head.linear is not None and torch.get_autocast_dtype("cuda") == torch.bfloat16:
        return chunked_nll(head, features, labels, label_smoothing, torch.bfloat16)
    return F.cross_entropy(head.compute_logits(features), labels, reduction="sum", label_smoothing=label_smoothing)


def chunked_nll(
    head: Head,
    features: Tensor,
    labels: Tensor,
    label_smoothing: float,
    dtype: torch.dtype,
    max_logits: int = _MAX_LOGITS,
) -> Tensor:
    """Compute `nll` in chunks of at most `max_logits` logits, with products in `dtype` and sums in float32 or more."""
    assert head.linear is not None
    bias: Tensor | None = head.linear.bias
    if head.final_logits_bias is not None:
        bias = head.final_logits_bias[0] if bias is None else bias + head.final_logits_bias[0]  # [outputs]
    inputs: tuple[Tensor, Tensor, Tensor | None] = features, head.linear.weight, bias
    if not torch.is_grad_enabled():  # otherwise the autograd function would compute gradients
        inputs = features.detach(), head.linear.weight.detach(), None if bias is None else bias.detach()
    with torch.autocast(features.device.type, enabled=False):
        options = label_smoothing, dtype, max_logits
        total: Tensor = _ChunkedNLL.apply(*inputs, labels, options)  # type: ignore[no-untyped-call]
    return total


def lm_head(model: nn.Module) -> Head:
    """Return the model's head, also if DistributedDataParallel wraps the model."""
    head = getattr(model, "module", model).head
    assert isinstance(head, Head)
    return head


class _ChunkedNLL(torch.autograd.Function):
    """Computes the gradient in the forward pass, while the logits exist."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,  # [M, width]
        weight: Tensor,  # [outputs, width]
        bias: Tensor | None,  # [outputs]
        labels: Tensor,  # [M]
        options: tuple[float, torch.dtype, int],
    ) -> Tensor:
        label_smoothing, dtype, max_logits = options
        outputs, width = weight.shape
        # padded with zero rows to a multiple of the tile size; the logits of these rows are ignored
        padded_weight = torch.zeros(
            -(-outputs // _OUTPUT_TILE) * _OUTPUT_TILE, width, dtype=dtype, device=features.device
        )
        padded_weight[:outputs] = weight
        x, accumulate_dtype = features.to(dtype), torch.promote_types(dtype, torch.float32)
        grad_features = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(padded_weight, dtype=accumulate_dtype) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros(outputs, dtype=accumulate_dtype, device=x.device) if ctx.needs_input_grad[2] else None
        kernel, totals = _fused_kernel() if x.device.type == "cuda" else nll_and_grad, []
        for begin, end in _chunk_bounds(len(x), max_logits // len(padded_weight)):
            loss, gradient = kernel(x[begin:end] @ padded_weight.T, bias, labels[begin:end], outputs, label_smoothing)
            totals.append(loss.sum())
            if grad_features is not None:
                torch.mm(gradient, padded_weight, out=grad_features[begin:end])
            if grad_weight is not None:
                _add_product(grad_weight, gradient.T, x[begin:end])
            if grad_bias is not None:
                grad_bias += gradient[:, :outputs].sum(0, dtype=accumulate_dtype)
        ctx.save_for_backward(grad_features, None if grad_weight is None else grad_weight[:outputs], grad_bias)
        ctx.dtypes = features.dtype, weight.dtype, None if bias is None else bias.dtype
        return torch.stack(totals).sum() if totals else torch.zeros((), dtype=accumulate_dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = gradients
        grads = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        # multiplied in the precision of grad_output: rounding it to bfloat16 would bias all gradients alike
        return (
            *(None if g is None else (g.to(grad_output.dtype) * grad_output).to(dtype) for g, dtype in grads),
            None,
            None,
        )


def nll_and_grad(
    logits: Tensor, bias: Tensor | None, labels: Tensor, outputs: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of each row and the gradient of its logits; logits after the first `outputs` are padding.

    # [m, padded], [outputs], [m] -> [m], [m, padded]
    """
    index = torch.arange(logits.shape[1], device=logits.device)
    is_output, is_label = index < outputs, index == labels[:, None]  # [padded], [m, padded]
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    x = x if bias is None else x + F.pad(bias, (0, logits.shape[1] - outputs))
    x = torch.where(is_output, x, -torch.inf)
    max_logit = x.amax(-1, keepdim=True)  # [m, 1]
    exp_logits = torch.exp(x - max_logit)
    sum_exp = exp_logits.sum(-1, keepdim=True)
    loss = (sum_exp.log() + max_logit)[:, 0] - (1 - label_smoothing) * torch.where(is_label, x, 0.0).sum(-1)
    gradient = exp_logits / sum_exp - torch.where(is_label, 1 - label_smoothing, 0.0)
    if label_smoothing:
        loss = loss - label_smoothing / outputs * torch.where(is_output, x, 0.0).sum(-1)
        gradient = gradient - torch.where(is_output, label_smoothing / outputs, 0.0)
    return loss, gradient.to(logits.dtype)


@cache
def _fused_kernel() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the Triton kernel, or `nll_and_grad` if Triton or the C compiler that it needs is missing."""
    if find_spec("triton") is None or not any(map(which, ("cc", "gcc", "clang"))):
        return nll_and_grad
    from qkv.objectives.triton_cross_entropy import nll_and_grad_

    return nll_and_grad_


def _chunk_bounds(rows: int, max_rows: int) -> list[tuple[int, int]]:
    """Return start and end of each chunk: of nearly equal size in whole tiles, with at most `max_rows` rows."""
    max_rows = max(max_rows // _ROW_TILE, 1) * _ROW_TILE
    count = max(-(-rows // max_rows), 1)
    size = max(-(-rows // (count * _ROW_TILE)) * _ROW_TILE, 1)
    return [(begin, min(begin + size, rows)) for begin in range(0, rows, size)]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`, in the precision of `total`."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
