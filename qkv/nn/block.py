"""Transformer block: self-attention, cross-attention and feed-forward, each with residual connection and norm.

Post-norm (Vaswani et al. 2017): x = norm(x + dropout(f(x))). Pre-norm (Xiong et al. 2020): x = x + dropout(f(norm(x))).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.nn.attention import Attention
from qkv.nn.dropout import dropout
from qkv.nn.feedforward import FeedForward
from qkv.nn.kernels import PositionBias, ScoreBias
from qkv.nn.kv_cache import KeyValues, KVCache
from qkv.nn.mask import Mask
from qkv.nn.norm import build_norm
from qkv.nn.ragged import PooledTokens, Ragged
from qkv.nn.relative_attention import RelativeAttention, TokenPairs, build_attention


class Streams(Protocol):
    """Computation of a block for several streams of queries with the same keys (`qkv.nn.two_stream`)."""

    def run_block(self, block: Block, x: Ragged) -> Ragged:
        """Return the output of a block for the tokens of all streams, one stream after the other.  # [T, width]"""


class Residual(nn.Module):
    """Residual connection, norm and dropout around a function of [T, width]."""

    def __init__(self, width: int, norm_spec: spec.Norm, norm_first: bool, dropout: float):
        super().__init__()
        self.norm = build_norm(norm_spec, width)
        self.norm_first = norm_first
        self.dropout = dropout

    def forward(self, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        return self.post(x, f(self.pre(x)))

    def pre(self, x: Tensor) -> Tensor:
        """Return the input of the function."""
        return self.norm(x) if self.norm_first else x

    def post(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the function's output y to its residual input x."""
        if self.training and self.dropout:
            y = dropout(y, self.dropout)
        needs_new_tensor = (
            y.requires_grad or x.requires_grad or y.dtype != x.dtype
        )  # else y, which has no other user, is reused
        y = x + y if needs_new_tensor else y.add_(x)
        return y if self.norm_first else self.norm(y)


class Block(nn.Module):
    """One layer of a stack."""

    def __init__(self, s: spec.Block):
        super().__init__()
        width = s.self_attention.query_dim

        def residual() -> Residual:
            return Residual(width, s.norm, s.norm_first, s.dropout)

        self.self_attention = build_attention(s.self_attention)
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
        bias: PositionBias | TokenPairs | None = None,
        cache: KVCache | None = None,
        pooled_tokens: PooledTokens | None = None,
        streams: Streams | None = None,
    ) -> Ragged:
        """Process all tokens, or only `pooled_tokens`; a cache is filled with keys and values.  # [T, width]"""
        if streams is not None:
            return streams.run_block(self, x)
        if pooled_tokens is not None:
            return self._forward_pooled_tokens(x, pooled_tokens)
        heads = self.self_attention.attend_heads(
            *self.project_qkv(x.values), x.layout, x.layout, mask, self._score_bias(bias), cache
        )  # [T, H, value]
        if self.cross_attention is None or encoder_hidden is None:
            return x.with_values(self.attn_out_and_ffn(x.values, heads))
        y, q = self.attn_out_and_cross_q(x.values, heads)
        k, v = self.cross_attention.project_kv(encoder_hidden.values)
        return x.with_values(
            self.cross_out_and_ffn(y, self.cross_attention.attend_heads(q, k, v, x.layout, encoder_hidden.layout))
        )

    def _score_bias(self, bias: PositionBias | TokenPairs | None) -> ScoreBias | None:
        if not isinstance(bias, TokenPairs):
            return bias
        assert isinstance(self.self_attention, RelativeAttention)  # only then is the bias made of pairs
        return self.self_attention.pair_bias(bias)

    def _forward_pooled_tokens(self, x: Ragged, pooled_tokens: PooledTokens) -> Ragged:
        """Compute one token of each sequence, which attends to all; the others only provide keys and values."""
        selected = x.values.index_select(0, pooled_tokens.indices)  # [B, width]
        q = self.self_attention.project_q(self.self_attention_residual.pre(selected))
        k, v = self.self_attention.project_kv(self.self_attention_residual.pre(x.values))
        return Ragged(
            self.attn_out_and_ffn(selected, self.self_attention.attend_heads(q, k, v, pooled_tokens.layout, x.layout)),
            pooled_tokens.layout,
        )

    # The position-wise parts between attention calls. They do not depend on sequence lengths, so that one compiled
    # version of each serves batches of any shape.

    def project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of self-attention."""
        return self.self_attention.project_qkv(self.self_attention_residual.pre(x))  # [T, H, size] each

    def attn_out_and_ffn(self, x: Tensor, heads: Tensor) -> Tensor:
        """Merge the heads of self-attention and apply the feed-forward layer."""
        y = self.self_attention_residual.post(x, self.self_attention.merge_heads(heads))
        out: Tensor = self.feedforward_residual(y, self.feedforward)
        return out  # [T, width]

    def attn_out_and_cross_q(self, x: Tensor, heads: Tensor) -> tuple[Tensor, Tensor]:
        """Merge the heads of self-attention and return the result with the queries of cross-attention."""
        assert self.cross_attention is not None
        assert self.cross_attention_residual is not None
        y = self.self_attention_residual.post(x, self.self_attention.merge_heads(heads))  # [T, width]
        return y, self.cross_attention.project_q(self.cross_attention_residual.pre(y))

    def cross_out_and_ffn(self, y: Tensor, heads: Tensor) -> Tensor:
        """Merge the heads of cross-attention and apply the feed-forward layer."""
        assert self.cross_attention is not None
        assert self.cross_attention_residual is not None
        out: Tensor = self.feedforward_residual(
            self.cross_attention_residual.post(y, self.cross_attention.merge_heads(heads)), self.feedforward
        )
        return out  # [T, width]

    def compile_sublayers(self) -> None:
        """Compile the position-wise parts, which fuses their element-wise operations; attention has its own kernels."""
        for name in ("project_qkv", "attn_out_and_ffn", "attn_out_and_cross_q", "cross_out_and_ffn"):
            setattr(self, name, torch.compile(getattr(self, name), dynamic=True))

    def compile_forward(self) -> None:
        """Compile the whole block as one graph.

        This reduces host overhead if attention is a single fused kernel (half precision on a GPU); other kernels are
        graph breaks. The first shape is specialized; a second one triggers compilation for dynamic shapes.
        """
        self.forward = torch.compile(self.forward)  # type: ignore[method-assign]

    def step(self, x: Tensor, cache: KVCache, cross_kv: KeyValues | None, bias: PositionBias | None = None) -> Tensor:
        """Process one new token per row.  # [R, width]"""
        x = self.self_attention_residual(x, lambda y: self.self_attention.step(y, cache, bias))
        if self.cross_attention is not None and self.cross_attention_residual is not None and cross_kv is not None:
            cross_attention = self.cross_attention
            x = self.cross_attention_residual(x, lambda y: cross_attention.attend_precomputed(y, cross_kv))
        out: Tensor = self.feedforward_residual(x, self.feedforward)
        return out
