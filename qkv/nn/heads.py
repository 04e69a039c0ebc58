"""Hidden to logits. Heads never see labels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.nn.attention import Attention
from qkv.nn.dropout import dropout
from qkv.nn.feedforward import ACTIVATIONS
from qkv.nn.norm import norm
from qkv.nn.ragged import End, Ragged


class AttentionPool(nn.Module):
    """One vector a sequence: attention with a learned query over states that are key and value in one.

    "Use case #1: sequence classification with RNNs" of the notes: no context, so the query is a trainable vector.
    """

    def __init__(self, s: spec.Attention):
        super().__init__()
        self.query = nn.Parameter(torch.empty(s.width))
        self.attention = Attention(s)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.query, std=len(self.query) ** -0.5)

    def forward(self, hidden: Ragged) -> Tensor:
        asked = self.query.expand(len(hidden), -1)  # [B, width]
        return self.attention.look(asked, self.attention.remember(hidden))  # [B, output]


class Head(nn.Module):
    """The seven heads of the notes are one: which vectors it reads, a dense layer or none, a linear layer."""

    offset: Tensor | None

    def __init__(self, s: spec.Head):
        super().__init__()
        self.spec = s
        self.pool = AttentionPool(s.pool) if isinstance(s.pool, spec.Attention) else None
        width = s.pool.output if isinstance(s.pool, spec.Attention) else s.width
        read = s.joined * width
        self.dense = None if s.dense is None else nn.Linear(read, width)
        self.norm = None if s.norm is None else norm(s.norm, width)
        self.linear = None if s.kind == "pooler" else nn.Linear(width if self.dense else read, s.outputs, bias=s.bias)
        self.register_buffer("offset", torch.zeros(1, s.outputs) if s.offset else None)

    @property
    def end(self) -> End | None:
        """Which token of a sequence it reads, where it is one."""
        if self.pool is not None or self.spec.at_each_token:
            return None
        return "last" if self.spec.pool == "last" else "first"

    def forward(self, hidden: Ragged | Tensor) -> Tensor:
        """All hidden states, or rows that somebody chose: logits of those.  # [T or B or R, outputs]"""
        return self.last(self.rows(hidden))

    def rows(self, hidden: Ragged | Tensor) -> Tensor:
        """What the last linear layer reads: all that comes before it, its input's dropout and scale included."""
        x = hidden if isinstance(hidden, Tensor) else self.read(hidden)
        drop = self.spec.dropout if self.training else 0.0
        if drop and self.spec.dropout_first:
            x = dropout(x, drop)
        if self.dense is not None and self.spec.dense is not None:
            x = ACTIVATIONS[self.spec.dense](self.dense(x))
        if self.norm is not None:
            x = self.norm(x)
        if self.linear is None:
            return x
        if drop:
            x = dropout(x, drop)
        return x if self.spec.scale == 1.0 else x * self.spec.scale  # [R, width]

    def last(self, rows: Tensor) -> Tensor:
        """The last linear layer, and the fixed vector that some add to it.  # [R, width] -> [R, outputs]"""
        if self.linear is None:
            return rows
        logits: Tensor = self.linear(rows)
        return logits if self.offset is None else logits + self.offset

    def read(self, hidden: Ragged) -> Tensor:
        """The vectors that this head judges: every token's, or one a sequence."""
        if self.spec.at_each_token:
            return hidden.values
        if self.pool is not None:
            pooled: Tensor = self.pool(hidden)
            return pooled
        if hidden.layout.longest == 1:
            return hidden.values  # as a body gives them that was told of `end`
        return hidden.values.index_select(0, hidden.layout.ends(self.end or "first").rows)  # [B, width]
