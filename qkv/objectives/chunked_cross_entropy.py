"""The one cross-entropy over a vocabulary: how likely a head finds the tokens that stood there.

A language model's logits are the largest thing in its training: 16 x 1024 tokens of GPT-2 have 3.3 GB of them in
float32, and a softmax with its gradient holds them several times. Under bfloat16 on a GPU they are therefore made for
some rows at a time, turned into their own gradient where they lie, and forgotten: what is kept until the backward pass
is the gradient of the rows and of the matrix. The products are those of three passes over the matrix either way.
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

_MAX_LOGITS = 2**28  # logits at a time: half a gigabyte; with twice or half of it an H200 is no faster
_ROW_TILE, _OUTPUT_TILE = (
    128,
    64,
)  # products of multiples of these fill a GPU's tiles: of 50,257 outputs they take 7 times longer


def nll(head: Head, features: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Negative log-likelihood of the labels, summed, from what the head's last layer reads.  # [M, width], [M] -> []

    With label smoothing (Szegedy et al. 2016) a share of each label is spread evenly over the vocabulary.
    """
    under_autocast = features.device.type == "cuda" and torch.is_autocast_enabled("cuda")
    if under_autocast and head.linear is not None and torch.get_autocast_dtype("cuda") == torch.bfloat16:
        return chunked_nll(head, features, labels, label_smoothing, torch.bfloat16)
    return F.cross_entropy(head.compute_logits(features), labels, reduction="sum", label_smoothing=label_smoothing)


def chunked_nll(
    head: Head, features: Tensor, labels: Tensor, label_smoothing: float, dtype: torch.dtype, max_logits: int = _MAX_LOGITS
) -> Tensor:
    """The same with products of that precision, of at most so many logits at a time; sums are of float32 or better."""
    assert head.linear is not None
    bias = head.linear.bias
    if head.final_logits_bias is not None:
        bias = head.final_logits_bias[0] if bias is None else bias + head.final_logits_bias[0]  # [outputs]
    inputs = features, head.linear.weight, bias
    if not torch.is_grad_enabled():  # else a function works out gradients that nobody asked for
        inputs = features.detach(), head.linear.weight.detach(), None if bias is None else bias.detach()
    with torch.autocast(features.device.type, enabled=False):
        total: Tensor = _ChunkedNLL.apply(*inputs, labels, (label_smoothing, dtype, max_logits))  # type: ignore[no-untyped-call]
    return total


def lm_head(model: nn.Module) -> Head:
    """The head that a loss is about; DistributedDataParallel keeps the model inside."""
    head = getattr(model, "module", model).head
    assert isinstance(head, Head)
    return head


class _ChunkedNLL(torch.autograd.Function):
    """Its forward pass works out the gradient too, as long as the logits are there."""

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
        # a product over an odd number of outputs is slow: rows of zeros make it even, and nobody looks at their logits
        padded_weight = torch.zeros(-(-outputs // _OUTPUT_TILE) * _OUTPUT_TILE, width, dtype=dtype, device=features.device)
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
        # multiplied in the outer one's precision: rounded to bfloat16 it would be wrong in the same way everywhere
        return *(None if g is None else (g.to(grad_output.dtype) * grad_output).to(dtype) for g, dtype in grads), None, None


def nll_and_grad(
    logits: Tensor, bias: Tensor | None, labels: Tensor, outputs: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Each row's negative log-likelihood, and the gradient of its logits; those past the outputs count for nothing.

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
    """In one pass; without Triton, or the C compiler that it asks for, in some operations of torch's."""
    if find_spec("triton") is None or not any(map(which, ("cc", "gcc", "clang"))):
        return nll_and_grad
    from qkv.objectives.triton_cross_entropy import nll_and_grad_

    return nll_and_grad_


def _chunk_bounds(rows: int, max_rows: int) -> list[tuple[int, int]]:
    """Where parts begin and end: as even as tiles allow, none of more rows than asked."""
    max_rows = max(max_rows // _ROW_TILE, 1) * _ROW_TILE
    count = max(-(-rows // max_rows), 1)
    size = max(-(-rows // (count * _ROW_TILE)) * _ROW_TILE, 1)
    return [(begin, min(begin + size, rows)) for begin in range(0, rows, size)]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += one @ other, added up in total's own precision."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
