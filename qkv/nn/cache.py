"""What decoding remembers: keys and values of the tokens so far, preallocated, and of the memory, made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.nn.ragged import Ragged


@dataclass
class Keys:
    """Prepared keys and values of whole sequences, padded, with who may be looked at."""

    keys: Tensor  # [B, H, M, P]
    values: Tensor  # [B, H, M, V]
    allowed: Tensor | None  # [B, 1, 1, M]; None: all
    sizes: Sequence[int]
    empty: Sequence[int] | None = None  # slots before each row's first; None: none

    def seen(self, weights: Tensor) -> Tensor:
        """Weights as somebody who watches wants them: each row from its first token on.  # [B, H, N, M]"""
        if self.empty is None:
            return weights
        return torch.stack([row.roll(-n, -1) for row, n in zip(weights, self.empty, strict=True)])

    def select(self, rows: Tensor, sizes: Sequence[int]) -> Keys:
        """The same for some sequences, or in another order."""
        allowed = None if self.allowed is None else self.allowed.index_select(0, rows)
        return Keys(self.keys.index_select(0, rows), self.values.index_select(0, rows), allowed, sizes)

    def first(self, rows: int) -> Keys:
        """The first `rows` sequences, without a copy."""
        allowed = None if self.allowed is None else self.allowed[:rows]
        return Keys(self.keys[:rows], self.values[:rows], allowed, self.sizes[:rows])


class Cache:
    """Room for `limit` tokens of `rows` sequences, written one step at a time."""

    def __init__(self, rows: int, heads: int, limit: int, key: int, value: int, like: Tensor):
        self.keys = like.new_zeros(rows, heads, limit, key)
        self.values = like.new_zeros(rows, heads, limit, value)
        self.filled = 0
        self.allowed: Tensor | None = None  # [R, 1, 1, limit]; None: every slot that is filled
        self.empty: list[int] | None = None  # slots before each row's prompt; None: none

    def fill(self, keys: Ragged, values: Ragged) -> None:
        """Takes in a prompt for each sentence, whose rows lie side by side; prompts end at the same slot.

        So the next token of every row goes to one slot, and distances between slots are those between tokens.
        """
        longest, each = keys.layout.longest, len(self.keys) // len(keys)
        room = torch.arange(longest, device=self.keys.device) >= longest - keys.layout.lengths[:, None]  # [B, M]
        for ours, theirs in ((self.keys, keys), (self.values, values)):
            padded = theirs.values.new_zeros(*room.shape, *theirs.values.shape[1:])  # [B, M, H, size]
            padded[room] = theirs.values
            ours[:, :, :longest] = padded.transpose(1, 2).repeat_interleave(each, 0)
        self.filled = longest
        if min(keys.layout.sizes) < longest:
            self.allowed = torch.ones(len(self.keys), 1, 1, self.keys.shape[2], dtype=torch.bool, device=room.device)
            self.allowed[..., :longest] = room.repeat_interleave(each, 0)[:, None, None]
            self.empty = [longest - n for n in keys.layout.sizes for _ in range(each)]

    def append(self, keys: Tensor, values: Tensor) -> Keys:
        """Adds one token a row and gives all so far, without a copy.  # [R, H, P], [R, H, V]"""
        self.keys[:, :, self.filled] = keys
        self.values[:, :, self.filled] = values
        self.filled += 1
        rows, n = self.keys.shape[0], self.filled
        allowed = None if self.allowed is None else self.allowed[..., :n]
        sizes = [n] * rows if self.empty is None else [n - before for before in self.empty]
        return Keys(self.keys[:, :, :n], self.values[:, :, :n], allowed, sizes, self.empty)

    def reorder(self, rows: Tensor) -> None:
        """Row i goes on from what row rows[i] remembers: how a beam changes its mind."""
        n = self.filled
        self.keys[:, :, :n] = self.keys[:, :, :n].index_select(0, rows)
        self.values[:, :, :n] = self.values[:, :, :n].index_select(0, rows)
