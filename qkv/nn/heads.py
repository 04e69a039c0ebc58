"""Hidden to logits. Heads never see labels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.nn.attention import Attention
from qkv.nn.ragged import Ragged


class LanguageModelHead(nn.Module):
    """Logits over the vocabulary at each token it is given."""

    def __init__(self, s: spec.Head):
        super().__init__()
        self.linear = nn.Linear(s.width, s.outputs, bias=s.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.linear(hidden)  # [T, vocabulary]
        return logits


class AttentionPool(nn.Module):
    """One vector a sequence: attention with a learned query over states that are key and value in one.

    "Use case #1: sequence classification with RNNs" of the notes: no context, so the query is a trainable vector.
    """

    def __init__(self, s: spec.Attention):
        super().__init__()
        self.query = nn.Parameter(torch.empty(s.width))
        self.attention = Attention(s)
        nn.init.normal_(self.query, std=s.width**-0.5)

    def forward(self, hidden: Ragged) -> Tensor:
        asked = self.query.expand(len(hidden), -1)  # [B, width]
        return self.attention.look(asked, self.attention.remember(hidden))  # [B, output]


class SequenceHead(nn.Module):
    """Logits over labels, once a sequence: from a pooled vector, or from the first token."""

    def __init__(self, s: spec.Head):
        super().__init__()
        self.pool = None if s.pool is None else AttentionPool(s.pool)
        self.linear = nn.Linear(s.width if s.pool is None else s.pool.output, s.outputs, bias=s.bias)

    def forward(self, hidden: Ragged) -> Tensor:
        firsts = hidden.layout.offsets[:-1].long()
        pooled = hidden.values[firsts] if self.pool is None else self.pool(hidden)
        logits: Tensor = self.linear(pooled)  # [B, labels]
        return logits
