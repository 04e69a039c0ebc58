"""Keys and values for decoding: those of the encoder output, and a preallocated cache of the tokens so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.nn.ragged import Ragged


@dataclass
class KeyValues:
    """Padded keys and values of whole sequences, and the mask of real keys."""

    keys: Tensor  # [B, H, M, P]
    values: Tensor  # [B, H, M, V]
    mask: Tensor | None  # [B, 1, 1, M]; None: all keys are real
    lengths: Sequence[int]  # real keys of each row
    left_padding: Sequence[int] | None = None  # padded slots before the first key of each row; None: none

    def strip_padding(self, weights: Tensor) -> Tensor:
        """Return recorded weights shifted so that each row begins with its first real key.  # [B, H, N, M]"""
        if self.left_padding is None:
            return weights
        return torch.stack([row.roll(-n, -1) for row, n in zip(weights, self.left_padding, strict=True)])

    def select(self, indices: Tensor, lengths: Sequence[int]) -> KeyValues:
        """Return the rows at `indices`, whose real keys are counted by `lengths`."""
        mask = None if self.mask is None else self.mask.index_select(0, indices)
        return KeyValues(self.keys.index_select(0, indices), self.values.index_select(0, indices), mask, lengths)

    def first_rows(self, num_rows: int) -> KeyValues:
        """Return views of the first `num_rows` rows."""
        mask = None if self.mask is None else self.mask[:num_rows]
        return KeyValues(self.keys[:num_rows], self.values[:num_rows], mask, self.lengths[:num_rows])


class KVCache:
    """Keys and values of up to `max_length` tokens in `num_rows` rows, appended one step at a time."""

    def __init__(self, num_rows: int, heads: int, max_length: int, key_dim: int, value_dim: int, like: Tensor):
        self.keys = like.new_zeros(num_rows, heads, max_length, key_dim)
        self.values = like.new_zeros(num_rows, heads, max_length, value_dim)
        self.length = 0
        self.mask: Tensor | None = None  # [R, 1, 1, max_length]; None: all filled slots are real
        self.left_padding: list[int] | None = None  # padded slots before the prompt of each row; None: none

    def prefill(self, keys: Ragged, values: Ragged) -> None:
        """Store one prompt per source, repeated for its adjacent rows.

        Prompts are padded on the left: the next token of every row goes into the same slot, and distances between slots
        are distances between tokens.
        """
        max_length, rows_per_sequence = keys.layout.max_length, len(self.keys) // len(keys)
        valid_mask = (
            torch.arange(max_length, device=self.keys.device) >= max_length - keys.layout.lengths[:, None]
        )  # [B, M]
        for buffer, prompt in ((self.keys, keys), (self.values, values)):
            padded = prompt.values.new_zeros(*valid_mask.shape, *prompt.values.shape[1:])  # [B, M, H, size]
            padded[valid_mask] = prompt.values
            buffer[:, :, :max_length] = padded.transpose(1, 2).repeat_interleave(rows_per_sequence, 0)
        self.length = max_length
        if min(keys.layout.lengths_list) < max_length:
            self.mask = torch.ones(len(self.keys), 1, 1, self.keys.shape[2], dtype=torch.bool, device=valid_mask.device)
            self.mask[..., :max_length] = valid_mask.repeat_interleave(rows_per_sequence, 0)[:, None, None]
            self.left_padding = [max_length - n for n in keys.layout.lengths_list for _ in range(rows_per_sequence)]

    def append(self, keys: Tensor, values: Tensor) -> KeyValues:
        """Append one token per row and return views of all tokens so far.  # [R, H, P], [R, H, V]"""
        self.keys[:, :, self.length] = keys
        self.values[:, :, self.length] = values
        self.length += 1
        num_rows, n = self.keys.shape[0], self.length
        mask = None if self.mask is None else self.mask[..., :n]
        lengths = [n] * num_rows if self.left_padding is None else [n - padding for padding in self.left_padding]
        return KeyValues(self.keys[:, :, :n], self.values[:, :, :n], mask, lengths, self.left_padding)

    def reorder(self, indices: Tensor) -> None:
        """Reorder the cache so that row i continues from row indices[i] (beam search)."""
        n = self.length
        self.keys[:, :, :n] = self.keys[:, :, :n].index_select(0, indices)
        self.values[:, :, :n] = self.values[:, :, :n].index_select(0, indices)
