"""One block: attention, cross-attention, feed-forward, each with residual and norm in the order that was chosen.

Post-norm, the paper's: x = norm(x + dropout(f(x))). Pre-norm (Xiong et al. 2020): x = x + dropout(f(norm(x))).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from qkv import spec
from qkv.nn.attend import Bias
from qkv.nn.attention import Attention
from qkv.nn.cache import Cache, Keys
from qkv.nn.dropout import dropout
from qkv.nn.feedforward import FeedForward
from qkv.nn.mask import Mask
from qkv.nn.norm import norm
from qkv.nn.ragged import Ragged


class Residual(nn.Module):
    """Puts residual, norm and dropout around a function of [T, width]."""

    def __init__(self, width: int, n: spec.Norm, norm_first: bool, dropout: float):
        super().__init__()
        self.norm = norm(n, width)
        self.norm_first = norm_first
        self.dropout = dropout

    def forward(self, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        y = f(self.norm(x)) if self.norm_first else f(x)
        if self.training and self.dropout:
            y = dropout(y, self.dropout)
        y = x + y
        return y if self.norm_first else self.norm(y)


class Block(nn.Module):
    def __init__(self, s: spec.Block):
        super().__init__()
        width = s.attention.width

        def residual() -> Residual:
            return Residual(width, s.norm, s.norm_first, s.dropout)

        self.attention = Attention(s.attention)
        self.around_attention = residual()
        self.cross = None if s.cross is None else Attention(s.cross)
        self.around_cross = None if s.cross is None else residual()
        self.feedforward = FeedForward(s.feedforward)
        self.around_feedforward = residual()

    def forward(
        self,
        x: Ragged,
        mask: Mask,
        memory: Ragged | None = None,
        bias: Bias | None = None,
        cache: Cache | None = None,
    ) -> Ragged:
        def look_around(values: Tensor) -> Tensor:
            around: Ragged = self.attention(x.like(values), mask=mask, bias=bias, cache=cache)
            return around.values

        def look_across(values: Tensor) -> Tensor:
            assert self.cross is not None
            across: Ragged = self.cross(x.like(values), memory)
            return across.values

        y = self.around_attention(x.values, look_around)  # [T, width]
        if self.around_cross is not None:
            y = self.around_cross(y, look_across)
        return x.like(self.around_feedforward(y, self.feedforward))

    def step(self, x: Tensor, cache: Cache, memory: Keys | None, bias: Tensor | None = None) -> Tensor:
        """The same for one new token a row.  # [R, width]"""
        x = self.around_attention(x, lambda y: self.attention.step(y, cache, bias))
        if self.cross is not None and self.around_cross is not None and memory is not None:
            cross = self.cross
            x = self.around_cross(x, lambda y: cross.look(y, memory))
        out: Tensor = self.around_feedforward(x, self.feedforward)
        return out
