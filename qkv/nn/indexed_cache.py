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

    def reset(self, slot: int) -> None:
        """Start anew at a slot."""
        self.slot.fill_(slot)
        self.rows.copy_(self.own_rows)
        self.starts.fill_(slot)

    def load(self, rows: Tensor, starts: list[int]) -> None:
        """Let rows [R] begin anew: each has filled the slots from its start on itself."""
        self.rows.index_copy_(0, rows, self.own_rows.index_select(0, rows))
        self.starts.index_copy_(0, rows, torch.tensor(starts, dtype=torch.int32, device=rows.device))

    def shift(self, offset: int) -> None:
        """Move the filled slots to the left by `offset`."""
        self.slot -= offset
        self.rows.copy_(torch.where(self._slots < self.slot, self.rows.roll(-offset, 1), self.own_rows))
        self.starts.sub_(offset).clamp_(min=0)

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

    def load(self, rows: Tensor, cache: KVCache, slot: int) -> None:
        """Copy the filled slots of another cache to rows [R], so that the next token goes into `slot`."""
        num_slots = cache.length - cache.first
        for target, source in ((self.keys, cache.keys), (self.values, cache.values)):
            filled = source[:, :, cache.first : cache.length].to(target.dtype)
            target[:, :, slot - num_slots : slot].index_copy_(0, rows, filled)

    def export(self, rows: Tensor, first: int, slot: int, left_padding: list[int]) -> KVCache:
        """Return the slots from `first` to `slot` of some rows, with the keys and values that the index names."""
        _, heads, _, size = self.keys.shape
        exported = KVCache(len(rows), heads, slot - first, size, self.values.shape[3], self.keys)
        table, slots = self.index.rows[rows, first:slot].long(), torch.arange(first, slot, device=rows.device)
        exported.keys.copy_(self.keys[table, :, slots].transpose(1, 2))  # [R, n, H, size] -> [R, H, n, size]
        exported.values.copy_(self.values[table, :, slots].transpose(1, 2))
        exported.length = slot - first
        exported.set_left_padding(left_padding)
        return exported

    def shift(self, offset: int) -> None:
        """Move the slots to the left by `offset`; what leaves on one side is never read again."""
        self.keys.copy_(self.keys.roll(-offset, 2))
        self.values.copy_(self.values.roll(-offset, 2))

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
