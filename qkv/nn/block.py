"""One block: attention, cross-attention, feed-forward, each with residual and norm in the order that was chosen.

Post-norm, the paper's: x = norm(x + dropout(f(x))). Pre-norm (Xiong et al. 2020): x = x + dropout(f(norm(x))).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.nn.attention import Attention
from qkv.nn.dropout import dropout
from qkv.nn.feedforward import FeedForward
from qkv.nn.kernels import PositionBias
from qkv.nn.kv_cache import KeyValues, KVCache
from qkv.nn.mask import Mask
from qkv.nn.norm import build_norm
from qkv.nn.ragged import PooledTokens, Ragged


class Residual(nn.Module):
    """Puts residual, norm and dropout around a function of [T, width]."""

    def __init__(self, width: int, norm_spec: spec.Norm, norm_first: bool, dropout: float):
        super().__init__()
        self.norm = build_norm(norm_spec, width)
        self.norm_first = norm_first
        self.dropout = dropout

    def forward(self, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        return self.post(x, f(self.pre(x)))

    def pre(self, x: Tensor) -> Tensor:
        """What the function reads."""
        return self.norm(x) if self.norm_first else x

    def post(self, x: Tensor, y: Tensor) -> Tensor:
        """What becomes of x and of the function's answer y."""
        if self.training and self.dropout:
            y = dropout(y, self.dropout)
        needs_new_tensor = y.requires_grad or x.requires_grad or y.dtype != x.dtype  # else y, which is nobody else's, may serve
        y = x + y if needs_new_tensor else y.add_(x)
        return y if self.norm_first else self.norm(y)


class Block(nn.Module):
    def __init__(self, s: spec.Block):
        super().__init__()
        width = s.self_attention.query_dim

        def residual() -> Residual:
            return Residual(width, s.norm, s.norm_first, s.dropout)

        self.self_attention = Attention(s.self_attention)
        self.self_attention_residual = residual()
        self.cross_attention = None if s.cross_attention is None else Attention(s.cross_attention)
        self.cross_attention_residual = None if s.cross_attention is None else residual()
        self.feedforward = FeedForward(s.feedforward)
        self.feedforward_residual = residual()

    def forward(
        self,
        x: Ragged,
        mask: Mask,
        encoder_hidden: Ragged | None = None,
        bias: PositionBias | None = None,
        cache: KVCache | None = None,
        pooled_tokens: PooledTokens | None = None,
    ) -> Ragged:
        if pooled_tokens is not None:
            return self._forward_pooled_tokens(x, pooled_tokens)
        heads = self.self_attention.attend_heads(*self.project_qkv(x.values), x.layout, x.layout, mask, bias, cache)  # [T, H, value]
        if self.cross_attention is None or encoder_hidden is None:
            return x.with_values(self.attn_out_and_ffn(x.values, heads))
        y, q = self.attn_out_and_cross_q(x.values, heads)
        k, v = self.cross_attention.project_kv(encoder_hidden.values)
        return x.with_values(self.cross_out_and_ffn(y, self.cross_attention.attend_heads(q, k, v, x.layout, encoder_hidden.layout)))

    def _forward_pooled_tokens(self, x: Ragged, pooled_tokens: PooledTokens) -> Ragged:
        """For one token of each sequence, which looks at all of them; the others need no more than keys and values."""
        selected = x.values.index_select(0, pooled_tokens.indices)  # [B, width]
        q = self.self_attention.project_q(self.self_attention_residual.pre(selected))
        k, v = self.self_attention.project_kv(self.self_attention_residual.pre(x.values))
        return Ragged(self.attn_out_and_ffn(selected, self.self_attention.attend_heads(q, k, v, pooled_tokens.layout, x.layout)), pooled_tokens.layout)

    # Between two looks at other tokens each token is worked on for itself. These parts know no lengths, so that one
    # compiled form of each serves batches of any shape.

    def project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.self_attention_residual.pre(x)
        return self.self_attention.project_q(y), *self.self_attention.project_kv(y)  # [T, H, size] each

    def attn_out_and_ffn(self, x: Tensor, heads: Tensor) -> Tensor:
        y = self.self_attention_residual.post(x, self.self_attention.merge_heads(heads))
        out: Tensor = self.feedforward_residual(y, self.feedforward)
        return out  # [T, width]

    def attn_out_and_cross_q(self, x: Tensor, heads: Tensor) -> tuple[Tensor, Tensor]:
        assert self.cross_attention is not None
        assert self.cross_attention_residual is not None
        y = self.self_attention_residual.post(x, self.self_attention.merge_heads(heads))  # [T, width]
        return y, self.cross_attention.project_q(self.cross_attention_residual.pre(y))

    def cross_out_and_ffn(self, y: Tensor, heads: Tensor) -> Tensor:
        assert self.cross_attention is not None
        assert self.cross_attention_residual is not None
        out: Tensor = self.feedforward_residual(self.cross_attention_residual.post(y, self.cross_attention.merge_heads(heads)), self.feedforward)
        return out  # [T, width]

    def compile_sublayers(self) -> None:
        """Fuses what lies between the matrix products; the looking itself has kernels of its own."""
        for name in ("project_qkv", "attn_out_and_ffn", "attn_out_and_cross_q", "cross_out_and_ffn"):
            setattr(self, name, torch.compile(getattr(self, name), dynamic=True))

    def compile_forward(self) -> None:
        """The same in one call, which asks less of the host: where the looking is one fused kernel, as on a GPU in half
        precision. Other kernels are left out of it, and then it is what its parts are.

        The first shape gets kernels of its own, which a shape that stays is worth; a second one those for any shape.
        """
        self.forward = torch.compile(self.forward)  # type: ignore[method-assign]

    def step(self, x: Tensor, cache: KVCache, cross_kv: KeyValues | None, bias: Tensor | None = None) -> Tensor:
        """The same for one new token a row.  # [R, width]"""
        x = self.self_attention_residual(x, lambda y: self.self_attention.step(y, cache, bias))
        if self.cross_attention is not None and self.cross_attention_residual is not None and cross_kv is not None:
            cross_attention = self.cross_attention
            x = self.cross_attention_residual(x, lambda y: cross_attention.attend_precomputed(y, cross_kv))
        out: Tensor = self.feedforward_residual(x, self.feedforward)
        return out
