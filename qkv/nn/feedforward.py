"""The position-wise feed-forward network: FFN(x) = activation(x W1 + b1) W2 + b2."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv import spec
from qkv.nn.dropout import dropout


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,  # in place: a projection's output is nobody else's
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class FeedForward(nn.Module):
    def __init__(self, s: spec.FeedForward):
        super().__init__()
        self.up = nn.Linear(s.width, s.hidden, bias=s.bias)
        self.gate = nn.Linear(s.width, s.hidden, bias=s.bias) if s.gated else None
        self.down = nn.Linear(s.hidden, s.width, bias=s.bias)
        self.dropout = s.dropout
        self.activation = ACTIVATIONS[s.activation]

    def forward(self, x: Tensor) -> Tensor:
        up: Tensor = self.up(x)  # [T, hidden]
        hidden = self.activation(up) if self.gate is None else self.activation(self.gate(x)) * up
        if self.training and self.dropout:
            hidden = dropout(hidden, self.dropout)
        out: Tensor = self.down(hidden)
        return out
