"""Dropout (Srivastava et al. 2014), drawn cheaply where torch draws it dearly."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LEVELS = 2**16  # a keep-or-drop decision takes 16 random bits, which is p to within 0.000008
_MIN_FAST_P = 0.01  # below it 16 bits would be too coarse a share of p


def dropout(x: Tensor, p: float) -> Tensor:
    """Zeroes each entry with probability p and scales the rest up, so that the expectation stays.

    On a CPU torch draws its masks one double at a time in one thread, which is a tenth of a training step. There, one
    64-bit draw decides for four entries; it comes from the same generator, so that a saved random state brings the
    same masks back.
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
        mask.mul_(_LEVELS / (_LEVELS - drop_level))  # by the p that was drawn with, so that nothing is biased
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return gradients[0] * mask, None
