"""N blocks of one shape, and what they remember while decoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.nn.block import Block
from qkv.nn.cache import Cache, Keys
from qkv.nn.mask import Causal, Full, Mask
from qkv.nn.norm import norm
from qkv.nn.ragged import Ragged


@dataclass
class Encoded:
    """What an encoder gives: a vector a token, and for a recurrent one its last state."""

    hidden: Ragged  # [T, width]
    last: Tensor | None = None  # [B, width]


@dataclass
class StackState:
    caches: list[Cache]  # each layer's own tokens so far
    memories: list[Keys | None]  # each layer's view of the encoder, made once

    def reorder(self, rows: Tensor) -> None:
        if torch.equal(rows, torch.arange(len(rows), device=rows.device)):
            return
        for cache in self.caches:
            cache.reorder(rows)


class Stack(nn.Module):
    def __init__(self, s: spec.Stack):
        super().__init__()
        self.mask: Mask = Causal() if s.causal else Full()
        self.blocks = nn.ModuleList(Block(s.block) for _ in range(s.depth))
        self.norm = norm(s.block.norm, s.width) if s.final_norm else None

    def forward(self, x: Ragged, memory: Encoded | None = None) -> Encoded:
        hidden = None if memory is None else memory.hidden
        for block in self.blocks:
            x = block(x, self.mask, hidden)
        return Encoded(x if self.norm is None else x.like(self.norm(x.values)))

    def start(self, memory: Encoded | None, rows: int, limit: int, like: Tensor) -> StackState:
        blocks = [b for b in self.blocks if isinstance(b, Block)]
        caches = [b.attention.cache(rows, limit, like) for b in blocks]
        memories = [b.cross.remember(memory.hidden) if b.cross is not None and memory else None for b in blocks]
        return StackState(caches, memories)

    def step(self, x: Tensor, state: StackState) -> Tensor:
        """One new token a row.  # [R, width]"""
        for block, cache, memory in zip(self.blocks, state.caches, state.memories, strict=True):
            assert isinstance(block, Block)
            x = block.step(x, cache, memory)
        return x if self.norm is None else self.norm(x)
