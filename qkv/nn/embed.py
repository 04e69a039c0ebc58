"""Tokens to vectors."""

from __future__ import annotations

import math

from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError
from qkv.nn.dropout import dropout
from qkv.nn.norm import norm
from qkv.nn.position import Learned, Sinusoid
from qkv.nn.ragged import Ragged


class Embed(nn.Module):
    """Token embedding, scaled where the paper scales it, plus position."""

    def __init__(self, s: spec.Embed):
        super().__init__()
        self.spec = s
        self.tokens = nn.Embedding(s.vocabulary, s.width)
        self.scale = math.sqrt(s.width) if s.scale else 1.0
        self.position: nn.Module | None = None
        if s.position == "sinusoid":
            self.position = Sinusoid(s.length, s.width)
        elif s.position == "learned":
            self.position = Learned(s.length, s.width)
        self.norm = None if s.norm is None else norm(s.norm, s.width)

    def forward(self, ids: Ragged) -> Ragged:
        """[T] -> [T, width]"""
        if ids.layout.longest > self.spec.length:
            raise InputError(f"a sequence of {ids.layout.longest} tokens; this model takes at most {self.spec.length}")
        return ids.like(self.at(ids.values, ids.layout.positions))

    def at(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Tokens at given places, as a step of decoding needs them.  # [R], [R] -> [R, width]"""
        x: Tensor = self.tokens(ids)
        if self.scale != 1.0:
            x = x * self.scale
        if self.position is not None:
            x = x + self.position(positions)
        if self.norm is not None:
            x = self.norm(x)
        return dropout(x, self.spec.dropout) if self.training and self.spec.dropout else x
