"""One block: attention, cross-attention, feed-forward, each with residual and norm in the order that was chosen.

Post-norm, the paper's: x = norm(x + dropout(f(x))). Pre-norm (Xiong et al. 2020): x = x + dropout(f(norm(x))).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.nn.attend import Bias
from qkv.nn.attention import Attention
from qkv.nn.cache import Cache, Keys
from qkv.nn.dropout import dropout
from qkv.nn.feedforward import FeedForward
from qkv.nn.mask import Mask
from qkv.nn.norm import norm
from qkv.nn.ragged import Ends, Ragged


class Residual(nn.Module):
    """Puts residual, norm and dropout around a function of [T, width]."""

    def __init__(self, width: int, n: spec.Norm, norm_first: bool, dropout: float):
        super().__init__()
        self.norm = norm(n, width)
        self.norm_first = norm_first
        self.dropout = dropout

    def forward(self, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        return self.after(x, f(self.before(x)))

    def before(self, x: Tensor) -> Tensor:
        """What the function reads."""
        return self.norm(x) if self.norm_first else x

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        """What becomes of x and of the function's answer y."""
        if self.training and self.dropout:
            y = dropout(y, self.dropout)
        fresh = y.requires_grad or x.requires_grad or y.dtype != x.dtype  # else y, which is nobody else's, may serve
        y = x + y if fresh else y.add_(x)
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
        ends: Ends | None = None,
    ) -> Ragged:
        if ends is not None:
            return self._at_ends(x, ends)
        heads = self.attention.mix(*self.ask(x.values), x.layout, x.layout, mask, bias, cache)  # [T, H, value]
        if self.cross is None or memory is None:
            return x.like(self.answer(x.values, heads))
        y, q = self.turn(x.values, heads)
        k, v = self.cross.keys_and_values(memory.values)
        return x.like(self.close(y, self.cross.mix(q, k, v, x.layout, memory.layout)))

    def _at_ends(self, x: Ragged, ends: Ends) -> Ragged:
        """For one token of each sequence, which looks at all of them; the others need no more than keys and values."""
        few = x.values.index_select(0, ends.rows)  # [B, width]
        q = self.attention.queries(self.around_attention.before(few))
        k, v = self.attention.keys_and_values(self.around_attention.before(x.values))
        return Ragged(self.answer(few, self.attention.mix(q, k, v, ends.layout, x.layout)), ends.layout)

    # Between two looks at other tokens each token is worked on for itself. These parts know no lengths, so that one
    # compiled form of each serves batches of any shape.

    def ask(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.around_attention.before(x)
        return self.attention.queries(y), *self.attention.keys_and_values(y)  # [T, H, size] each

    def answer(self, x: Tensor, heads: Tensor) -> Tensor:
        y = self.around_attention.after(x, self.attention.join(heads))
        out: Tensor = self.around_feedforward(y, self.feedforward)
        return out  # [T, width]

    def turn(self, x: Tensor, heads: Tensor) -> tuple[Tensor, Tensor]:
        assert self.cross is not None
        assert self.around_cross is not None
        y = self.around_attention.after(x, self.attention.join(heads))  # [T, width]
        return y, self.cross.queries(self.around_cross.before(y))

    def close(self, y: Tensor, heads: Tensor) -> Tensor:
        assert self.cross is not None
        assert self.around_cross is not None
        out: Tensor = self.around_feedforward(self.around_cross.after(y, self.cross.join(heads)), self.feedforward)
        return out  # [T, width]

    def compile_parts(self) -> None:
        """Fuses what lies between the matrix products; the looking itself has kernels of its own."""
        for name in ("ask", "answer", "turn", "close"):
            setattr(self, name, torch.compile(getattr(self, name), dynamic=True))

    def compile_whole(self) -> None:
        """The same in one call, which asks less of the host: where the looking is one fused kernel, as on a GPU in half
        precision. Other kernels are left out of it, and then it is what its parts are.

        The first shape gets kernels of its own, which a shape that stays is worth; a second one those for any shape.
        """
        self.forward = torch.compile(self.forward)  # type: ignore[method-assign]

    def step(self, x: Tensor, cache: Cache, memory: Keys | None, bias: Tensor | None = None) -> Tensor:
        """The same for one new token a row.  # [R, width]"""
        x = self.around_attention(x, lambda y: self.attention.step(y, cache, bias))
        if self.cross is not None and self.around_cross is not None and memory is not None:
            cross = self.cross
            x = self.around_cross(x, lambda y: cross.look(y, memory))
        out: Tensor = self.around_feedforward(x, self.feedforward)
        return out
