"""N blocks of one shape, and what they remember while decoding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from qkv import spec
from qkv.errors import InputError
from qkv.nn.attention import Attention
from qkv.nn.block import Block
from qkv.nn.cache import Cache, Keys
from qkv.nn.dropout import dropout
from qkv.nn.mask import Causal, Full, Mask
from qkv.nn.norm import norm
from qkv.nn.position import Relative
from qkv.nn.ragged import End, Ends, Ragged


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
    recompute: bool = False  # in training keep what goes into a block and work the rest out again; see `recompute`

    def __init__(self, s: spec.Stack):
        super().__init__()
        self.spec = s
        self.mask: Mask = Causal() if s.causal else Full()
        self.blocks = nn.ModuleList(Block(_block(s, layer)) for layer in range(s.depth))
        self.norm = norm(s.block.norm, s.width) if s.final_norm else None
        self.relative = None if s.relative is None else Relative(s.relative, s.block.attention.heads, s.causal)

    def forward(
        self, x: Ragged, memory: Encoded | None = None, state: StackState | None = None, read: End | None = None
    ) -> Encoded:
        """All tokens at once; a state's caches are filled with them.

        Who will `read` one token of each sequence gets those alone, where the last block can leave the others out.
        """
        last = x
        ends = x.layout.ends(read) if read is not None and self._may_leave_out(read, memory, state) else None
        for last in self._walk(x, memory, state, ends):  # noqa: B007  # one layer's output is alive at a time
            pass
        return Encoded(last.like(self._last(last.values)))

    def _may_leave_out(self, read: End, memory: Encoded | None, state: StackState | None) -> bool:
        """The token has to see its whole sequence, and nobody else may want the others or their distances."""
        sees_all = read == "last" or not self.spec.causal
        plain = memory is None and state is None and self.relative is None
        return sees_all and plain and not _watched(self.blocks[-1])

    def layers(self, x: Ragged, memory: Encoded | None = None) -> list[Tensor]:
        """What goes into the first block and what comes out of each, the last one behind the final norm."""
        found = [x.values, *(y.values for y in self._walk(x, memory, None))]
        return [*found[:-1], self._last(found[-1])]  # [T, width] each

    def _walk(
        self, x: Ragged, memory: Encoded | None, state: StackState | None, ends: Ends | None = None
    ) -> Iterator[Ragged]:
        hidden = None if memory is None else memory.hidden
        bias = None if self.relative is None else _Distances(self.relative)
        twice = self.recompute and self.training and torch.is_grad_enabled() and state is None
        for layer, block in enumerate(self.blocks):
            only = ends if layer == len(self.blocks) - 1 else None
            if twice and not _watched(block):  # who watches would be told twice
                x = self._forgetful(block, x, hidden, bias, only)
            else:
                x = block(x, self.mask, hidden, bias, None if state is None else state.caches[layer], only)
            yield x

    def _forgetful(
        self, block: nn.Module, x: Ragged, memory: Ragged | None, bias: _Distances | None, ends: Ends | None
    ) -> Ragged:
        """A block of which nothing but its input is kept until its gradient is asked for."""
        asking, looked_at = x.layout, None if memory is None else memory.layout

        def forward(values: Tensor, remembered: Tensor | None) -> Tensor:
            there = None if remembered is None or looked_at is None else Ragged(remembered, looked_at)
            out: Tensor = block(Ragged(values, asking), self.mask, there, bias, None, ends).values
            return out

        # tensors go in bare: from them torch sees on which device dropout's random state is to be kept
        remembered = None if memory is None else memory.values
        values = checkpoint(forward, x.values, remembered, use_reentrant=False, preserve_rng_state=True)
        assert isinstance(values, Tensor)
        return x.like(values) if ends is None else Ragged(values, ends.layout)

    def start(self, memory: Encoded | None, rows: int, limit: int, like: Tensor) -> StackState:
        blocks = [b for b in self.blocks if isinstance(b, Block)]
        caches = [b.attention.cache(rows, limit, like) for b in blocks]
        memories = [b.cross.remember(memory.hidden) if b.cross is not None and memory else None for b in blocks]
        return StackState(caches, memories)

    def step(self, x: Tensor, state: StackState) -> Tensor:
        """One new token a row.  # [R, width]"""
        bias = None
        if self.relative is not None:
            places = torch.arange(state.caches[0].filled + 1, device=x.device)
            bias = self.relative(places[-1:], places)  # [H, 1, n]
        for block, cache, memory in zip(self.blocks, state.caches, state.memories, strict=True):
            assert isinstance(block, Block)
            x = block.step(x, cache, memory, bias)
        return self._last(x)

    def _last(self, x: Tensor) -> Tensor:
        x = x if self.norm is None else self.norm(x)
        return dropout(x, self.spec.dropout) if self.training and self.spec.dropout else x


def recompute(model: nn.Module, on: bool = True) -> None:
    """Trades time for memory (Chen et al. 2016): in training a block keeps its input alone, and its forward pass runs
    again when the backward pass comes to it. Outputs and gradients stay the same to the bit."""
    stacks = [m for m in model.modules() if isinstance(m, Stack)]
    if not stacks:
        raise InputError("recompute: this model has no Transformer blocks to work out again; leave it out")
    for stack in stacks:
        stack.recompute = on


def _watched(block: nn.Module) -> bool:
    return any(isinstance(m, Attention) and m.sink is not None for m in block.children())


def _block(s: spec.Stack, layer: int) -> spec.Block:
    if not s.scale_by_depth:
        return s.block
    attention = s.block.attention
    return spec.replace(s.block, attention=spec.replace(attention, scale=attention.scale / (layer + 1)))


class _Distances:
    """A stack's relative term for one forward pass: each size is made once and serves all layers."""

    def __init__(self, relative: Relative):
        self.relative = relative
        self.made: dict[tuple[int, int], Tensor] = {}

    def __call__(self, queries: int, keys: int) -> Tensor:
        if (queries, keys) not in self.made:
            places = torch.arange(max(queries, keys), device=self.relative.weight.device)
            # kept as it is: the block that asks first may be one that forgets, and this is not its own to make again
            with saved_tensors_hooks(_same, _same):
                self.made[queries, keys] = self.relative(places[:queries], places[:keys])  # [H, N, M]
        return self.made[queries, keys]


def _same(tensor: Tensor) -> Tensor:
    return tensor
