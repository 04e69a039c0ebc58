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
from qkv.objectives.loss import IGNORE_INDEX

_MAX_LOGITS = 2**28  # logits per chunk: half a gigabyte; an H200 is no faster with twice or half as many
# Sizes that are multiples of these use whole tiles of a GPU's matrix product; 50,257 outputs take 7 times longer.
_ROW_TILE, _OUTPUT_TILE = 128, 64


def nll(head: Head, features: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the negative log-likelihood of the labels, summed.  # [M, width], [M] -> []

    Args:
        head: the language-model head.
        features: inputs of the head's last layer.
        labels: token ids; rows with `IGNORE_INDEX` do not count.
        label_smoothing: fraction of each label that is distributed evenly over the vocabulary (Szegedy et al. 2016).
    """
    if head.adaptive_softmax is not None:
        return head.adaptive_softmax.nll(features, labels, label_smoothing, IGNORE_INDEX)
    if _uses_chunks(head, features):
        return chunked_nll(head, features, labels, label_smoothing, torch.bfloat16)
    return F.cross_entropy(head.compute_logits(features), labels, reduction="sum", label_smoothing=label_smoothing)


def rdrop_nll(head: Head, features: Tensor, labels: Tensor, label_smoothing: float, alpha: float) -> Tensor:
    """Return the loss of R-Drop (Liang et al. 2021), summed: of two passes, the mean of `nll` and of the divergence.

    # [2 M, width], [M] -> []

    Args:
        head: the language-model head.
        features: inputs of the head's last layer, those of the second pass after those of the first.
        labels: token ids; rows with `IGNORE_INDEX` do not count.
        label_smoothing: as in `nll`.
        alpha: weight of the mean of KL(p, q) and KL(q, p), the divergences between the two passes.
    """
    if _uses_chunks(head, features):
        return chunked_nll(head, features, labels, label_smoothing, torch.bfloat16, rdrop_alpha=alpha)
    logits = head.compute_logits(features)  # [2 M, vocabulary]
    total = F.cross_entropy(logits, labels.repeat(2), reduction="sum", label_smoothing=label_smoothing)
    log_p, log_q = torch.log_softmax(logits.float(), -1).chunk(2)  # [M, vocabulary] each
    symmetric_kl = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1)  # [M] KL(p, q) + KL(q, p)
    symmetric_kl = torch.where(labels == IGNORE_INDEX, 0.0, symmetric_kl)
    return total / 2 + alpha / 4 * symmetric_kl.sum()


def _uses_chunks(head: Head, features: Tensor) -> bool:
    under_autocast = features.device.type == "cuda" and torch.is_autocast_enabled("cuda")
    return under_autocast and head.linear is not None and torch.get_autocast_dtype("cuda") == torch.bfloat16


def chunked_nll(
    head: Head,
    features: Tensor,
    labels: Tensor,
    label_smoothing: float,
    dtype: torch.dtype,
    max_logits: int = _MAX_LOGITS,
    rdrop_alpha: float | None = None,
) -> Tensor:
    """Compute `nll` in chunks of at most `max_logits` logits, with products in `dtype` and sums in float32 or more.

    With `rdrop_alpha` it computes `rdrop_nll`.
    """
    assert head.linear is not None
    bias: Tensor | None = head.linear.bias
    if head.final_logits_bias is not None:
        bias = head.final_logits_bias[0] if bias is None else bias + head.final_logits_bias[0]  # [outputs]
    inputs: tuple[Tensor, Tensor, Tensor | None] = features, head.linear.weight, bias
    if not torch.is_grad_enabled():  # otherwise the autograd function would compute gradients
        inputs = features.detach(), head.linear.weight.detach(), None if bias is None else bias.detach()
    with torch.autocast(features.device.type, enabled=False):
        options = label_smoothing, rdrop_alpha, dtype, max_logits
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
        features: Tensor,  # [M, width]; for R-Drop [2 M, width]
        weight: Tensor,  # [outputs, width]
        bias: Tensor | None,  # [outputs]
        labels: Tensor,  # [M]
        options: tuple[float, float | None, torch.dtype, int],
    ) -> Tensor:
        label_smoothing, rdrop_alpha, dtype, max_logits = options
        outputs, width = weight.shape
        # padded with zero rows to a multiple of the tile size; the logits of these rows are ignored
        padded_weight = torch.zeros(
            -(-outputs // _OUTPUT_TILE) * _OUTPUT_TILE, width, dtype=dtype, device=features.device
        )
        padded_weight[:outputs] = weight
        passes, accumulate_dtype = 1 if rdrop_alpha is None else 2, torch.promote_types(dtype, torch.float32)
        x = features.to(dtype).view(passes, -1, width)
        grad_features = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(padded_weight, dtype=accumulate_dtype) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros(outputs, dtype=accumulate_dtype, device=x.device) if ctx.needs_input_grad[2] else None
        kernel, totals = _fused_kernel() if x.device.type == "cuda" else nll_and_grad, []
        for begin, end in _chunk_bounds(len(labels), max_logits // (passes * len(padded_weight))):
            chunk = x[:, begin:end].flatten(0, 1)  # [passes * m, width]
            logits, chunk_labels = chunk @ padded_weight.T, labels[begin:end]
            loss, gradient = kernel(logits, bias, chunk_labels, outputs, label_smoothing, rdrop_alpha)
            totals.append(loss.sum())
            if grad_features is not None:
                _write_product(grad_features[:, begin:end], gradient, padded_weight)
            if grad_weight is not None:
                _add_product(grad_weight, gradient.T, chunk)
            if grad_bias is not None:
                grad_bias += gradient[:, :outputs].sum(0, dtype=accumulate_dtype)
        grad_features = None if grad_features is None else grad_features.flatten(0, 1)
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
    logits: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    outputs: int,
    label_smoothing: float,
    rdrop_alpha: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each label and the gradient of its logits; logits after the first `outputs` are padding.

    With `rdrop_alpha` the rows of the second pass follow those of the first, and the loss is that of `rdrop_nll`.
    # [m or 2 m, padded], [outputs], [m] -> [m], [m or 2 m, padded]
    """
    passes = 1 if rdrop_alpha is None else 2
    x = logits[:, :outputs].to(torch.promote_types(logits.dtype, torch.float32))
    log_p = torch.log_softmax(x if bias is None else x + bias, -1).view(passes, -1, outputs)  # [passes, m, outputs]
    p, is_label = log_p.exp(), torch.arange(outputs, device=logits.device) == labels[:, None]  # [m, outputs]
    target = torch.where(is_label, 1 - label_smoothing, 0.0) + label_smoothing / outputs
    loss, gradient = -(target * log_p).sum(-1).mean(0), (p - target) / passes
    if rdrop_alpha is not None:
        difference, other_p = log_p - log_p.flip(0), p.flip(0)
        divergence = (p * difference).sum(-1, keepdim=True)  # [2, m, 1] KL(p, q) and KL(q, p)
        loss = loss + rdrop_alpha / 2 * divergence[..., 0].mean(0)
        gradient = gradient + rdrop_alpha / 4 * (p * (difference - divergence) + p - other_p)
    counts = labels != IGNORE_INDEX  # [m]
    loss, gradient = torch.where(counts, loss, 0.0), torch.where(counts[:, None], gradient, 0.0).flatten(0, 1)
    return loss, F.pad(gradient, (0, logits.shape[1] - outputs)).to(logits.dtype)


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


def _write_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write a @ b to `out`, whose rows may be two blocks.  # [passes, m, width], [passes * m, n], [n, width]"""
    if out.is_contiguous():
        torch.mm(a, b, out=out.flatten(0, 1))
    else:
        out.copy_((a @ b).view_as(out))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`, in the precision of `total`."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
