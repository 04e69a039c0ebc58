"""Heads: hidden states to logits. Heads never see labels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.nn.attention import Attention
from qkv.nn.decode_ops import linear
from qkv.nn.dropout import dropout
from qkv.nn.feedforward import ACTIVATIONS
from qkv.nn.norm import build_norm
from qkv.nn.ragged import PooledToken, Ragged


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
        width = s.pool.output_dim if isinstance(s.pool, spec.Attention) else s.d_model
        input_dim = s.num_concat_layers * width
        self.dense = None if s.dense_activation is None else nn.Linear(input_dim, width)
        self.norm = None if s.norm is None else build_norm(s.norm, width)
        self.linear = (
            None if s.kind == "pooler" else nn.Linear(width if self.dense else input_dim, s.num_outputs, bias=s.bias)
        )
        self.register_buffer("final_logits_bias", torch.zeros(1, s.num_outputs) if s.final_logits_bias else None)

    @property
    def pooled_token(self) -> PooledToken | None:
        """Token of each sequence that the head reads; None: it reads several."""
        if self.pool is not None or self.spec.pool == "mean" or self.spec.is_token_level:
            return None
        return "last" if self.spec.pool == "last" else "first"

    def forward(self, hidden: Ragged | Tensor) -> Tensor:
        """Return the logits of hidden states, or of selected rows [R, width].  # [T or B or R, outputs]"""
        return self.compute_logits(self.compute_features(hidden))

    def compute_features(self, hidden: Ragged | Tensor) -> Tensor:
        """Return the input of the last linear layer, with dropout and scaling applied."""
        x = hidden if isinstance(hidden, Tensor) else self.pool_hidden(hidden)
        dropout_prob = self.spec.dropout if self.training else 0.0
        if dropout_prob and self.spec.dropout_before_dense:
            x = dropout(x, dropout_prob)
        if self.dense is not None and self.spec.dense_activation is not None:
            x = ACTIVATIONS[self.spec.dense_activation](self.dense(x))
        if self.norm is not None:
            x = self.norm(x)
        if self.linear is None:
            return x
        if dropout_prob:
            x = dropout(x, dropout_prob)
        return x if self.spec.input_scale == 1.0 else x * self.spec.input_scale  # [R, width]

    def compute_logits(self, features: Tensor) -> Tensor:
        """Apply the last linear layer and add the constant bias of some models.  # [R, width] -> [R, outputs]"""
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
        if hidden.layout.max_length == 1:
            return hidden.values  # the backbone already selected `pooled_token`
        return hidden.values.index_select(
            0, hidden.layout.pooled_tokens(self.pooled_token or "first").indices
        )  # [B, width]
