"""Heads: hidden states to logits. Heads never see labels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.nn.adaptive import AdaptiveSoftmax
from qkv.nn.attention import Attention
from qkv.nn.decode_ops import linear
from qkv.nn.dropout import dropout
from qkv.nn.feedforward import ACTIVATIONS
from qkv.nn.norm import BatchNorm, build_norm
from qkv.nn.ragged import PooledToken, Ragged

_ENDS: tuple[PooledToken, PooledToken] = ("first", "last")


class AttentionPool(nn.Module):
    """One vector per sequence: attention with a learned query over hidden states, which are both keys and values.

    "Use case #1: sequence classification with RNNs" of the notes: without context the query is a trainable vector.
    """

    def __init__(self, s: spec.Attention):
        super().__init__()
        self.query = nn.Parameter(torch.empty(s.query_dim))
        self.attention = Attention(s)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the query."""
        nn.init.normal_(self.query, std=len(self.query) ** -0.5)

    def forward(self, hidden: Ragged) -> Tensor:
        """Return the pooled vectors.  # [T, width] -> [B, output]"""
        values, device_type = hidden.values, hidden.values.device.type
        if torch.is_autocast_enabled(device_type):  # states used without projections stay in float32 otherwise
            values = values.to(torch.get_autocast_dtype(device_type))
        queries = self.query.to(values.dtype).expand(len(hidden), -1)  # [B, width]
        q, k, v = self.attention.project_q(queries), *self.attention.project_kv(values)
        query_layout = hidden.layout.pooled_tokens("first").layout  # one query per sequence
        return self.attention.merge_heads(self.attention.attend_heads(q, k, v, query_layout, hidden.layout))


class Head(nn.Module):
    """All heads of the notes: pooling or none, an optional dense layer, a linear layer."""

    final_logits_bias: Tensor | None

    def __init__(self, s: spec.Head):
        super().__init__()
        self.spec = s
        self.pool = AttentionPool(s.pool) if isinstance(s.pool, spec.Attention) else None
        self.dense = None if s.dense_activation is None else nn.Linear(s.pooled_dim, s.dense_dim)
        self.norm = None if s.norm is None else build_norm(s.norm, s.dense_dim)
        input_dim = s.dense_dim if self.dense else s.pooled_dim
        self.pooled_norm = BatchNorm(s.pooled_dim) if s.batch_norm else None
        self.dense_norm = BatchNorm(s.dense_dim) if s.batch_norm and self.dense else None
        self.adaptive_softmax = None if s.clusters is None else AdaptiveSoftmax(s)
        has_linear = s.kind != "pooler" and s.clusters is None
        self.linear = nn.Linear(input_dim, s.num_outputs, bias=s.bias) if has_linear else None
        self.register_buffer("final_logits_bias", torch.zeros(1, s.num_outputs) if s.final_logits_bias else None)

    @property
    def pooled_token(self) -> PooledToken | None:
        """Token of each sequence that the head reads; None: it reads several."""
        if self.pool is not None or self.spec.pool in ("mean", "concat", "final") or self.spec.is_token_level:
            return None
        return "last" if self.spec.pool == "last" else "first"

    def forward(self, hidden: Ragged | Tensor) -> Tensor:
        """Return the logits of hidden states, or of selected rows [R, width].  # [T or B or R, outputs]"""
        return self.compute_logits(self.compute_features(hidden))

    def compute_features(self, hidden: Ragged | Tensor) -> Tensor:
        """Return the input of the last linear layer, with dropout and scaling applied."""
        x = hidden if isinstance(hidden, Tensor) else self.pool_hidden(hidden)
        dropout_prob = self.spec.dropout if self.training else 0.0
        if self.pooled_norm is not None:
            x = self.pooled_norm(x)
        if dropout_prob and self.spec.dropout_before_dense:
            x = dropout(x, dropout_prob)
        if self.dense is not None and self.spec.dense_activation is not None:
            x = ACTIVATIONS[self.spec.dense_activation](self.dense(x))
        if self.dense_norm is not None:
            x = self.dense_norm(x)
        if self.norm is not None:
            x = self.norm(x)
        if self.linear is None:
            return x
        if dropout_prob:
            x = dropout(x, dropout_prob)
        return x if self.spec.input_scale == 1.0 else x * self.spec.input_scale  # [R, width]

    def compute_logits(self, features: Tensor) -> Tensor:
        """Apply the last linear layer and add the constant bias of some models.  # [R, width] -> [R, outputs]"""
        if self.adaptive_softmax is not None:
            log_probs: Tensor = self.adaptive_softmax(features)
            return log_probs
        if self.linear is None:
            return features
        logits = linear(features, self.linear)
        return logits if self.final_logits_bias is None else logits + self.final_logits_bias

    def pool_hidden(self, hidden: Ragged) -> Tensor:
        """Return the vectors that the head reads: of every token, or one per sequence."""
        if self.spec.is_token_level:
            return hidden.values
        if self.pool is not None:
            pooled: Tensor = self.pool(hidden)
            return pooled
        if self.spec.pool == "mean":
            return hidden.mean()  # [B, width]
        if self.spec.pool == "final":
            return _final_states(hidden)
        if self.spec.pool == "concat":
            last = hidden.values.index_select(0, hidden.layout.pooled_tokens("last").indices)  # [B, width]
            return torch.cat([last, hidden.max(), hidden.mean().to(last.dtype)], -1)  # [B, 3 * width]
        if hidden.layout.max_length == 1:
            return hidden.values  # the backbone already selected `pooled_token`
        return hidden.values.index_select(
            0, hidden.layout.pooled_tokens(self.pooled_token or "first").indices
        )  # [B, width]


def _final_states(hidden: Ragged) -> Tensor:
    """Return the states in which both directions end: the forward one at the last token, the other at the first.

    # [T, 2 * hidden] -> [B, 2 * hidden]
    """
    forward, backward = hidden.values.chunk(2, -1)  # [T, hidden] each
    first, last = (hidden.layout.pooled_tokens(token).indices for token in _ENDS)
    return torch.cat([forward.index_select(0, last), backward.index_select(0, first)], -1)
