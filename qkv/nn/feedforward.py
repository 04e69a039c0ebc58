"""The position-wise feed-forward network: FFN(x) = activation(x W1 + b1) W2 + b2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv import spec
from qkv.nn.dropout import dropout


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if x.requires_grad:  # the gradient needs the input
        return F.gelu(x, approximate=approximate)
    output: Tensor = torch.ops.aten.gelu_(x, approximate=approximate)
    return output


# in place where possible: the projection's output has no other user, and new memory costs more than the function
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "gelu": _gelu,
    "gelu_tanh": partial(_gelu, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
}


class FeedForward(nn.Module):
    """Feed-forward layer, or its gated form (Shazeer 2020)."""

    def __init__(self, s: spec.FeedForward):
        super().__init__()
        self.up = nn.Linear(s.d_model, s.d_ff, bias=s.bias)
        self.gate = nn.Linear(s.d_model, s.d_ff, bias=s.bias) if s.gated else None
        self.down = nn.Linear(s.d_ff, s.d_model, bias=s.bias)
        self.dropout = s.dropout
        self.activation_name = s.activation
        self.activation = ACTIVATIONS[s.activation]

    def forward(self, x: Tensor) -> Tensor:
        """[T, width] -> [T, width]"""
        up: Tensor = self.up(x)  # [T, hidden]
        hidden = self.activation(up) if self.gate is None else self.activation(self.gate(x)) * up
        if self.training and self.dropout:
            hidden = dropout(hidden, self.dropout)
        out: Tensor = self.down(hidden)
        return out
