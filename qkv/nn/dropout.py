"""Dropout (Srivastava et al. 2014), with a faster random mask on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LEVELS = 2**16  # each decision uses 16 random bits, so that p is exact to 0.000008
_MIN_FAST_P = 0.01  # below it the rounding would be too large relative to p


def dropout(x: Tensor, p: float) -> Tensor:
    """Set each entry to zero with probability p and scale the rest, so that the expectation is unchanged.

    On a CPU PyTorch draws one double per entry in a single thread, a tenth of the time of a training step. Here one
    64-bit number decides for four entries. It comes from PyTorch's generator, so that a saved random state reproduces
    the masks.
    """
    if x.device.type != "cpu" or not _MIN_FAST_P <= p < 1.0 or torch.compiler.is_compiling():
        return F.dropout(x, p)
    dropped: Tensor = _Dropout.apply(x, p)  # type: ignore[no-untyped-call]
    return dropped


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        drop_level = min(round(p * _LEVELS), _LEVELS - 1)
        draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        random_int16 = draws.view(torch.int16)[: x.numel()].view(x.shape)  # uniform over all of int16
        mask = torch.empty_like(x, memory_format=torch.contiguous_format)
        torch.ge(random_int16, drop_level - _LEVELS // 2, out=mask)
        mask.mul_(_LEVELS / (_LEVELS - drop_level))  # with the rounded p, so that the expectation is exact
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return gradients[0] * mask, None
