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

_ENTRIES = 2**28  # logits at a time: half a gigabyte; with twice or half of it an H200 is no faster
_ROWS, _OUTPUTS = (
    128,
    64,
)  # products of multiples of these fill a GPU's tiles: of 50,257 outputs they take 7 times longer


def nll(head: Head, rows: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Negative log-likelihood of the labels, summed, from what the head's last layer reads.  # [M, width], [M] -> []

    With label smoothing (Szegedy et al. 2016) a share of each label is spread evenly over the vocabulary.
    """
    half = rows.device.type == "cuda" and torch.is_autocast_enabled("cuda")
    if half and head.linear is not None and torch.get_autocast_dtype("cuda") == torch.bfloat16:
        return in_parts(head, rows, labels, smoothing, torch.bfloat16)
    return F.cross_entropy(head.last(rows), labels, reduction="sum", label_smoothing=smoothing)


def in_parts(
    head: Head, rows: Tensor, labels: Tensor, smoothing: float, kind: torch.dtype, entries: int = _ENTRIES
) -> Tensor:
    """The same with products of that precision, of at most so many logits at a time; sums are of float32 or better."""
    assert head.linear is not None
    added = head.linear.bias
    if head.offset is not None:
        added = head.offset[0] if added is None else added + head.offset[0]  # [outputs]
    given = rows, head.linear.weight, added
    if not torch.is_grad_enabled():  # else a function works out gradients that nobody asked for
        given = rows.detach(), head.linear.weight.detach(), None if added is None else added.detach()
    with torch.autocast(rows.device.type, enabled=False):
        total: Tensor = _Likelihood.apply(*given, labels, (smoothing, kind, entries))  # type: ignore[no-untyped-call]
    return total


def head_of(model: nn.Module) -> Head:
    """The head that a loss is about; DistributedDataParallel keeps the model inside."""
    head = getattr(model, "module", model).head
    assert isinstance(head, Head)
    return head


class _Likelihood(torch.autograd.Function):
    """Its forward pass works out the gradient too, as long as the logits are there."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,  # [M, width]
        weight: Tensor,  # [outputs, width]
        added: Tensor | None,  # [outputs]
        labels: Tensor,  # [M]
        how: tuple[float, torch.dtype, int],
    ) -> Tensor:
        smoothing, kind, entries = how
        outputs, width = weight.shape
        # a product over an odd number of outputs is slow: rows of zeros make it even, and nobody looks at their logits
        matrix = torch.zeros(-(-outputs // _OUTPUTS) * _OUTPUTS, width, dtype=kind, device=rows.device)
        matrix[:outputs] = weight
        x, wide = rows.to(kind), torch.promote_types(kind, torch.float32)
        by_rows = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        by_weight = torch.zeros_like(matrix, dtype=wide) if ctx.needs_input_grad[1] else None
        by_added = torch.zeros(outputs, dtype=wide, device=x.device) if ctx.needs_input_grad[2] else None
        turn, totals = _turn() if x.device.type == "cuda" else turned, []
        for begin, end in _parts(len(x), entries // len(matrix)):
            loss, gradient = turn(x[begin:end] @ matrix.T, added, labels[begin:end], outputs, smoothing)
            totals.append(loss.sum())
            if by_rows is not None:
                torch.mm(gradient, matrix, out=by_rows[begin:end])
            if by_weight is not None:
                _add_product(by_weight, gradient.T, x[begin:end])
            if by_added is not None:
                by_added += gradient[:, :outputs].sum(0, dtype=wide)
        ctx.save_for_backward(by_rows, None if by_weight is None else by_weight[:outputs], by_added)
        ctx.kinds = rows.dtype, weight.dtype, None if added is None else added.dtype
        return torch.stack(totals).sum() if totals else torch.zeros((), dtype=wide, device=x.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (outer,) = gradients
        inner = zip(ctx.saved_tensors, ctx.kinds, strict=True)
        # multiplied in the outer one's precision: rounded to bfloat16 it would be wrong in the same way everywhere
        return *(None if g is None else (g.to(outer.dtype) * outer).to(kind) for g, kind in inner), None, None


def turned(
    logits: Tensor, added: Tensor | None, labels: Tensor, outputs: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Each row's negative log-likelihood, and the gradient of its logits; those past the outputs count for nothing.

    # [m, padded], [outputs], [m] -> [m], [m, padded]
    """
    place = torch.arange(logits.shape[1], device=logits.device)
    real, asked = place < outputs, place == labels[:, None]  # [padded], [m, padded]
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    x = x if added is None else x + F.pad(added, (0, logits.shape[1] - outputs))
    x = torch.where(real, x, -torch.inf)
    top = x.amax(-1, keepdim=True)  # [m, 1]
    exponents = torch.exp(x - top)
    whole = exponents.sum(-1, keepdim=True)
    loss = (whole.log() + top)[:, 0] - (1 - smoothing) * torch.where(asked, x, 0.0).sum(-1)
    gradient = exponents / whole - torch.where(asked, 1 - smoothing, 0.0)
    if smoothing:
        loss = loss - smoothing / outputs * torch.where(real, x, 0.0).sum(-1)
        gradient = gradient - torch.where(real, smoothing / outputs, 0.0)
    return loss, gradient.to(logits.dtype)


@cache
def _turn() -> Callable[..., tuple[Tensor, Tensor]]:
    """In one pass; without Triton, or the C compiler that it asks for, in some operations of torch's."""
    if find_spec("triton") is None or not any(map(which, ("cc", "gcc", "clang"))):
        return turned
    from qkv.objectives.softmax import turn

    return turn


def _parts(rows: int, at_once: int) -> list[tuple[int, int]]:
    """Where parts begin and end: as even as tiles allow, none of more rows than asked."""
    at_once = max(at_once // _ROWS, 1) * _ROWS
    count = max(-(-rows // at_once), 1)
    size = max(-(-rows // (count * _ROWS)) * _ROWS, 1)
    return [(begin, min(begin + size, rows)) for begin in range(0, rows, size)]


def _add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """total += one @ other, added up in total's own precision."""
    if total.dtype == one.dtype:
        total.addmm_(one, other)
    else:
        torch.addmm(total, one, other, out_dtype=total.dtype, out=total)
