"""Keys and values for decoding: those of the encoder output, and a preallocated cache of the tokens so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
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
    watched: bool = False  # whether each step of attention to them leaves its weights in `weights`
    weights: Tensor | None = None  # [R, M] mean over the heads

    def strip_padding(self, weights: Tensor) -> Tensor:
        """Return recorded weights shifted so that each row begins with its first real key.  # [B, H, N, M]"""
        if self.left_padding is None:
            return weights
        return torch.stack([row.roll(-n, -1) for row, n in zip(weights, self.left_padding, strict=True)])

    def select(self, indices: Tensor, lengths: Sequence[int]) -> KeyValues:
        """Return the rows at `indices`, whose real keys are counted by `lengths`."""
        mask = None if self.mask is None else self.mask.index_select(0, indices)
        keys, values = self.keys.index_select(0, indices), self.values.index_select(0, indices)
        return KeyValues(keys, values, mask, lengths, watched=self.watched)

    def merge(self, kept: Tensor, other: KeyValues | None) -> KeyValues:
        """Return the rows at `kept`, then those of `other`, padded on the right to the longest of them."""
        lengths = [self.lengths[row] for row in kept.tolist()]
        parts = [self.select(kept, lengths)] if other is None else [self.select(kept, lengths), other]
        lengths = [n for part in parts for n in part.lengths]
        max_length = max(lengths)
        keys, values = (
            torch.cat([_resize(part.keys, max_length) for part in parts]),
            torch.cat([_resize(part.values, max_length) for part in parts]),
        )
        return self._padded(keys, values, lengths)

    def keep(self, kept: Tensor) -> KeyValues:
        """Return views of the rows at `kept`, which are moved to the front; few of them should have to."""
        lengths = [self.lengths[row] for row in kept.tolist()]
        max_length = max(lengths)
        keys, values = (_move_to_front(x, kept)[:, :, :max_length] for x in (self.keys, self.values))
        return self._padded(keys, values, lengths)

    def _padded(self, keys: Tensor, values: Tensor, lengths: list[int]) -> KeyValues:
        max_length = keys.shape[2]
        if min(lengths) == max_length:
            return KeyValues(keys, values, None, lengths, watched=self.watched)
        mask = torch.arange(max_length, device=keys.device) < torch.tensor(lengths, device=keys.device)[:, None]
        return KeyValues(keys, values, mask[:, None, None], lengths, watched=self.watched)

    def last_keys(self, num_keys: int) -> KeyValues:
        """Return views of the last `num_keys` keys of each row, which are padded on the left."""
        mask = None if self.mask is None else self.mask[..., -num_keys:]
        lengths = [min(n, num_keys) for n in self.lengths]
        cut = max(0, self.keys.shape[2] - num_keys)
        padding = None if self.left_padding is None else [max(0, n - cut) for n in self.left_padding]
        return KeyValues(self.keys[:, :, -num_keys:], self.values[:, :, -num_keys:], mask, lengths, padding)

    def first_rows(self, num_rows: int) -> KeyValues:
        """Return views of the first `num_rows` rows."""
        mask = None if self.mask is None else self.mask[:num_rows]
        return KeyValues(self.keys[:num_rows], self.values[:num_rows], mask, self.lengths[:num_rows])


def source_rows(sources: Tensor, rows_per_source: int) -> Tensor:
    """Return the rows of sources that have adjacent rows.  # [S] -> [S * rows_per_source]"""
    return (sources[:, None] * rows_per_source + torch.arange(rows_per_source, device=sources.device)).flatten()


def _move_to_front(rows: Tensor, kept: Tensor) -> Tensor:
    """Put the rows at `kept` into the first places in their order, and return a view of these."""
    moved = (kept != torch.arange(len(kept), device=kept.device)).nonzero().squeeze(1)
    rows[moved] = rows[kept[moved]]
    return rows[: len(kept)]


def _resize(padded: Tensor, length: int) -> Tensor:
    """Cut or pad keys or values to a number of slots.  # [B, H, M, size] -> [B, H, length, size]"""
    return F.pad(padded[:, :, :length], (0, 0, 0, max(0, length - padded.shape[2])))


class KVCache:
    """Keys and values of up to `max_length` tokens in `num_rows` rows, appended one step at a time.

    Rows are padded on the left: the next token of every row goes into the same slot, and distances between slots are
    distances between tokens.
    """

    def __init__(self, num_rows: int, heads: int, max_length: int, key_dim: int, value_dim: int, like: Tensor):
        self.keys = like.new_zeros(num_rows, heads, max_length, key_dim)  # zeros: padding has weight 0, times a number
        self.values = like.new_zeros(num_rows, heads, max_length, value_dim)
        self.length = 0
        self.left_padding = [0] * num_rows  # slots before the first token of each row
        self.first = 0  # the lowest of them
        self.mask: Tensor | None = None  # [R, 1, 1, max_length]; None: all slots from `first` on are real

    def prefill(self, keys: Ragged, values: Ragged) -> None:
        """Store one prompt per source, repeated for its adjacent rows."""
        max_length, rows_per_sequence = keys.layout.max_length, len(self.keys) // len(keys)
        for buffer, prompt in ((self.keys, keys), (self.values, values)):
            padded = prompt.to_left_padded().transpose(1, 2)  # [B, H, M, size]
            buffer[:, :, :max_length] = (
                padded if rows_per_sequence == 1 else padded.repeat_interleave(rows_per_sequence, 0)
            )
        self.length = max_length
        self.set_left_padding([max_length - n for n in keys.layout.lengths_list for _ in range(rows_per_sequence)])

    def set_left_padding(self, left_padding: list[int]) -> None:
        """Declare how many slots precede the first token of each row."""
        self.left_padding, self.first, self.mask = left_padding, min(left_padding, default=0), None
        if max(left_padding, default=0) > self.first:
            slots = torch.arange(self.keys.shape[2], device=self.keys.device)
            starts = torch.tensor(left_padding, device=self.keys.device)
            self.mask = (slots >= starts[:, None])[:, None, None]

    def append(self, keys: Tensor, values: Tensor) -> KeyValues:
        """Append one token per row and return views of all tokens so far.  # [R, H, P], [R, H, V]"""
        self.keys[:, :, self.length] = keys
        self.values[:, :, self.length] = values
        self.length += 1
        first, n = self.first, self.length
        lengths = [n - padding for padding in self.left_padding]
        views = self.keys[:, :, first:n], self.values[:, :, first:n]
        if self.mask is None:
            return KeyValues(*views, None, lengths)
        padding = [padding - first for padding in self.left_padding]
        return KeyValues(*views, self.mask[..., first:n], lengths, padding)

    def reorder(self, indices: Tensor) -> None:
        """Reorder the cache so that row i continues from row indices[i] (beam search)."""
        n = self.length
        self.keys[:, :, :n] = self.keys[:, :, :n].index_select(0, indices)
        self.values[:, :, :n] = self.values[:, :, :n].index_select(0, indices)

    def keep(self, kept: Tensor) -> None:
        """Keep the rows at `kept`, which are moved to the front; few of them should have to."""
        self.keys, self.values = _move_to_front(self.keys, kept), _move_to_front(self.values, kept)
        self.set_left_padding([self.left_padding[row] for row in kept.tolist()])

    def merge(self, kept: Tensor, other: KVCache) -> KVCache:
        """Return the rows at `kept`, then those of `other`, with as much room for new tokens as they had."""
        caches = [(self, kept), (other, torch.arange(len(other.keys)))]
        lengths = [[cache.length - cache.left_padding[row] for row in rows.tolist()] for cache, rows in caches]
        length = max(max(part, default=0) for part in lengths)
        max_length = length + max(cache.keys.shape[2] - cache.length for cache, _ in caches)
        num_rows, (_, heads, _, key_dim) = sum(map(len, lengths)), self.keys.shape
        merged = KVCache(num_rows, heads, max_length, key_dim, self.values.shape[3], self.keys)
        first_row = 0
        for (cache, rows), row_lengths in zip(caches, lengths, strict=True):
            num_slots, end = max(row_lengths, default=0), first_row + len(rows)
            for target, source in ((merged.keys, cache.keys), (merged.values, cache.values)):
                filled = source[:, :, cache.length - num_slots : cache.length]
                target[first_row:end, :, length - num_slots : length] = filled.index_select(0, rows.to(source.device))
            first_row = end
        merged.length = length
        merged.set_left_padding([length - n for part in lengths for n in part])
        return merged
