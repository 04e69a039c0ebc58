"""A KV cache whose length and beams are tensors on the device, so that a decoding step can be a CUDA graph.

An index table names the row that holds the keys and values of each slot. Beam search rewrites the table instead of
copying the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.nn.kv_cache import KVCache
from qkv.nn.position import RelativePositionBias

try:
    from qkv.nn.triton_decode import decode_attention
except ImportError:  # no Triton: `_decode_attention` computes the same
    decode_attention = None  # type: ignore[assignment]

HAS_KERNEL = decode_attention is not None


class CacheIndex:
    """What the caches of all layers share: the next slot, the first slot of each row, and the index table."""

    def __init__(self, num_rows: int, max_length: int, device: torch.device) -> None:
        self.slot = torch.zeros(1, dtype=torch.int32, device=device)  # of the next token
        self.starts = torch.zeros(num_rows, dtype=torch.int32, device=device)  # first real slot of each row
        self.own_rows = torch.arange(num_rows, dtype=torch.int32, device=device)[:, None].repeat(1, max_length)
        self.rows = self.own_rows.clone()  # [R, M] row of the cache that holds a slot
        self._slots = torch.arange(max_length, dtype=torch.int32, device=device)

    def reset(self, length: int, left_padding: list[int] | None) -> None:
        """Start after `length` slots, which each row has filled itself but for its padding."""
        self.slot.fill_(length)
        self.rows.copy_(self.own_rows)
        self.starts.zero_()
        if left_padding is not None:
            self.starts[: len(left_padding)] = torch.tensor(left_padding, dtype=torch.int32)

    def reorder(self, indices: Tensor) -> None:
        """Let row i continue from row indices[i]: its filled slots are those of that row."""
        is_filled = self._slots < self.slot  # [M]
        self.rows.copy_(torch.where(is_filled, self.rows.index_select(0, indices), self.own_rows))


class IndexedKVCache(KVCache):
    """Keys and values that are appended and attended to by one kernel."""

    def __init__(self, cache: KVCache, index: CacheIndex, bias_by_distance: Tensor | None) -> None:
        """Make an empty cache with the heads, sizes and dtype of another one and the rows and slots of an index."""
        num_rows, max_length = index.rows.shape
        _, heads, _, size = cache.keys.shape
        super().__init__(num_rows, heads, max_length, size, cache.values.shape[3], cache.keys)
        self.index, self.bias_by_distance = index, bias_by_distance  # [H, M]

    def load(self, cache: KVCache) -> None:
        """Copy the filled slots of another cache."""
        num_rows, n = len(cache.keys), cache.length
        self.keys[:num_rows, :, :n].copy_(cache.keys[:, :, :n])
        self.values[:num_rows, :, :n].copy_(cache.values[:, :, :n])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Append one token per row and attend to all tokens so far.  # [R, H, size] each -> [R, H, value]"""
        index = self.index
        if decode_attention is None or not q.is_cuda:
            return self._attend_on_host(q, k, v, scale)
        arguments = index.rows, index.slot, index.starts, self.bias_by_distance, scale
        return decode_attention(q, k, v, self.keys, self.values, *arguments)

    def _attend_on_host(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Compute what the kernel computes, for tests on machines without a GPU."""
        slot = int(self.index.slot)
        self.keys[:, :, slot], self.values[:, :, slot] = k, v
        slots = torch.arange(slot + 1, device=q.device)
        rows = self.index.rows[:, : slot + 1].long()  # [R, n]
        rows[:, slot] = self.index.own_rows[:, 0].long()
        keys, values = self.keys[rows, :, slots], self.values[rows, :, slots]  # [R, n, H, size]
        scores = torch.einsum("rhd,rnhd->rhn", q.float(), keys.float()) * scale
        if self.bias_by_distance is not None:
            scores = scores + self.bias_by_distance[:, : slot + 1].flip(-1)
        is_padding = slots < self.index.starts[:, None]  # [R, n]
        weights = torch.softmax(scores.masked_fill(is_padding[:, None], float("-inf")), -1)
        return torch.einsum("rhn,rnhd->rhd", weights, values.float()).to(q.dtype)


def bias_by_distance(bias: RelativePositionBias | None, max_length: int) -> Tensor | None:
    """Return the relative position bias of a key at each distance before the query.  # [H, M]"""
    if bias is None:
        return None
    positions = torch.arange(max_length, device=bias.weight.device)
    by_key: Tensor = bias(positions[-1:], positions)  # [H, 1, M]
    return by_key[:, 0].flip(-1).contiguous()
