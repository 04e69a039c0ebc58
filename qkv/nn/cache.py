"""What decoding remembers: keys and values of the tokens so far, preallocated, and of the memory, made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Keys:
    """Prepared keys and values of whole sequences, padded, with who may be looked at."""

    keys: Tensor  # [B, H, M, P]
    values: Tensor  # [B, H, M, V]
    allowed: Tensor | None  # [B, 1, 1, M]; None: all
    sizes: Sequence[int]

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

    def append(self, keys: Tensor, values: Tensor) -> Keys:
        """Adds one token a row and gives all so far, without a copy.  # [R, H, P], [R, H, V]"""
        self.keys[:, :, self.filled] = keys
        self.values[:, :, self.filled] = values
        self.filled += 1
        rows, n = self.keys.shape[0], self.filled
        return Keys(self.keys[:, :, :n], self.values[:, :, :n], None, [n] * rows)

    def reorder(self, rows: Tensor) -> None:
        """Row i goes on from what row rows[i] remembers: how a beam changes its mind."""
        n = self.filled
        self.keys[:, :, :n] = self.keys[:, :, :n].index_select(0, rows)
        self.values[:, :, :n] = self.values[:, :, :n].index_select(0, rows)
