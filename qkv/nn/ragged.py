"""Ragged batches: the tokens of all sequences in one run, [T, …], and their lengths. No padding inside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv.errors import InputError


class TimeMajor(NamedTuple):
    """The same tokens ordered step by step, longest sequence first: what a recurrent network walks over."""

    order: Tensor  # [B] sequences by falling length
    permutation: Tensor  # [T] packed place of each time-major token
    inverse: Tensor  # [T] time-major place of each packed token
    batch_sizes: list[int]  # how many sequences reach step t
    order_list: list[int]  # `order`, on the host


PooledToken = Literal["first", "last"]
_POOLED_TOKENS: tuple[PooledToken, ...] = ("first", "last")
_KERNEL_TILE = 128


class PooledTokens(NamedTuple):
    """One token of each sequence."""

    indices: Tensor  # [B] where they lie
    layout: BatchLayout  # of these tokens alone


class BatchLayout:
    """Where each sequence lies in a packed batch, on the host and on the device; shared by all layers."""

    is_static: bool = False  # others with as many tokens and sequences come in its place; see `qkv.train.perf.static_batch`

    def __init__(self, seq_lens: Sequence[int], device: torch.device | str = "cpu"):
        self.lengths_list = tuple(int(n) for n in seq_lens)
        if min(self.lengths_list, default=0) < 1:
            raise InputError("a batch needs at least one sequence, and each sequence at least one token")
        self.num_tokens = sum(self.lengths_list)
        self.max_length = max(self.lengths_list)
        self.is_uniform = min(self.lengths_list) == self.max_length  # all equally long
        lengths = torch.tensor(self.lengths_list, dtype=torch.long)
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
        positions = torch.arange(self.num_tokens) - cu_seqlens[:-1].repeat_interleave(lengths)
        self.host_tensors = lengths, cu_seqlens, positions  # kept where they were made: asking the device would wait for it
        self._move_to(torch.device(device))

    def _move_to(self, device: torch.device) -> None:
        packed = to_device_async(torch.cat(self.host_tensors), device)  # one copy for all three
        split_sizes = [len(tensor) for tensor in self.host_tensors]
        self.lengths, cu_seqlens, self.positions = torch.split(packed, split_sizes)  # [B], [B + 1], [T] place in its own sequence
        self.cu_seqlens = cu_seqlens.to(torch.int32)
        self.plan_cache: dict[Any, Any] = {}  # what kernels worked out about this layout, once for all layers

    def __len__(self) -> int:
        return len(self.lengths_list)

    @property
    def device(self) -> torch.device:
        return self.lengths.device

    def padded_index(self) -> Tensor:
        """Each token's place in the flattened [B * longest] padded form.  # [T]"""
        if "padded_index" not in self.plan_cache:
            row_ids = torch.arange(len(self)).repeat_interleave(torch.tensor(self.lengths_list, dtype=torch.long))
            self.plan_cache["padded_index"] = row_ids.to(self.device) * self.max_length + self.positions
        index: Tensor = self.plan_cache["padded_index"]
        return index

    def valid_mask(self) -> Tensor:
        """True where a padded form holds a token.  # [B, longest]"""
        if "valid_mask" not in self.plan_cache:
            self.plan_cache["valid_mask"] = torch.arange(self.max_length, device=self.device) < self.lengths[:, None]
        mask: Tensor = self.plan_cache["valid_mask"]
        return mask

    def pooled_tokens(self, token: PooledToken) -> PooledTokens:
        if token not in self.plan_cache:
            self.plan_cache[token] = PooledTokens(self._pooled_indices(token), BatchLayout([1] * len(self), self.device))
        pooled: PooledTokens = self.plan_cache[token]
        return pooled

    def _pooled_indices(self, token: PooledToken) -> Tensor:
        return (self.cu_seqlens[:-1] if token == "first" else self.cu_seqlens[1:] - 1).long()  # [B]

    def to(self, device: torch.device | str) -> BatchLayout:
        moved = copy(self)
        moved._move_to(torch.device(device))
        return moved

    def mark_static(self) -> BatchLayout:
        """Says of itself that others, of as many tokens and sequences, come in its place; being even is then chance."""
        self.is_static, self.is_uniform = True, False
        return self

    @property
    def kernel_max_length(self) -> int:
        """The longest that a variable-length kernel is told of, which looks at that many keys together anyway."""
        return -(-self.max_length // _KERNEL_TILE) * _KERNEL_TILE

    def copy_from(self, other: BatchLayout) -> None:
        """Another's places, written where a recording reads these; what else was planned stays as it is."""
        for destination, source in (
            (self.lengths, other.lengths),
            (self.cu_seqlens, other.cu_seqlens),
            (self.positions, other.positions),
        ):
            destination.copy_(source)
        for token in _POOLED_TOKENS:
            if token in self.plan_cache:
                self.plan_cache[token].indices.copy_(other._pooled_indices(token))

    @property
    def can_copy_from(self) -> bool:
        """Whether nothing was planned about it that `copy_from` leaves as it is."""
        return all(cache_key in _POOLED_TOKENS and not entry.layout.plan_cache for cache_key, entry in self.plan_cache.items())

    def time_major(self) -> TimeMajor:
        if "time_major" not in self.plan_cache:
            lengths = torch.tensor(self.lengths_list, dtype=torch.long)
            order = torch.sort(lengths, descending=True, stable=True).indices
            starts = torch.tensor([0, *accumulate(self.lengths_list)][:-1], dtype=torch.long)
            batch_sizes = [int((lengths > t).sum()) for t in range(self.max_length)]
            permutation = torch.cat([starts[order[:n]] + t for t, n in enumerate(batch_sizes)])
            inverse = torch.empty_like(permutation)
            inverse[permutation] = torch.arange(self.num_tokens)
            device = self.device
            self.plan_cache["time_major"] = TimeMajor(order.to(device), permutation.to(device), inverse.to(device), batch_sizes, order.tolist())
        cached: TimeMajor = self.plan_cache["time_major"]
        return cached


def to_device_async(tensor: Tensor, device: torch.device) -> Tensor:
    """On a device; to a GPU from pinned memory: any other copy waits until it has done all that it was told before.

    A CUDA graph would note where that memory was, and read there what has come since: a recording is refused.
    """
    if device.type != "cuda" or tensor.is_cuda or torch.cuda.is_current_stream_capturing():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass
class Ragged:
    """`values` [T, …] of sequences that lie one after the other as `layout` says."""

    values: Tensor
    layout: BatchLayout

    @staticmethod
    def pack(sequences: Iterable[Tensor]) -> Ragged:
        """Sequences [n_i, …] of any lengths, one after the other."""
        tensors = list(sequences)
        return Ragged(torch.cat(tensors), BatchLayout([len(p) for p in tensors], tensors[0].device))

    @staticmethod
    def from_lengths(values: Tensor, lengths: Sequence[int] | Tensor) -> Ragged:
        """Packed values [T, …] with their lengths [B]."""
        lengths_list = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        layout = BatchLayout(lengths_list, values.device)
        if layout.num_tokens != len(values):
            raise InputError(f"{len(values)} tokens cannot be cut into sequences of {layout.num_tokens} in all")
        return Ragged(values, layout)

    @staticmethod
    def from_padded(padded: Tensor, lengths: Sequence[int] | Tensor) -> Ragged:
        """From what users have: [B, N, …] and the number of real tokens in each row."""
        lengths_list = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        layout = BatchLayout(lengths_list, padded.device)
        if len(layout) != padded.shape[0] or layout.max_length > padded.shape[1]:
            raise InputError(f"lengths {list(layout.lengths_list)} do not fit a padded batch of {list(padded.shape[:2])}")
        valid_mask = torch.arange(padded.shape[1], device=padded.device) < layout.lengths[:, None]  # [B, N]
        return Ragged(padded[valid_mask], layout)

    def to_padded(self, fill_value: float = 0.0) -> Tensor:
        """[B, longest, …] with `fill_value` behind each sequence's end."""
        shape = (len(self.layout) * self.layout.max_length, *self.values.shape[1:])
        flat = self.values.new_full(shape, fill_value).index_copy(0, self.layout.padded_index(), self.values)
        return flat.view(len(self.layout), self.layout.max_length, *shape[1:])

    def with_values(self, values: Tensor) -> Ragged:
        """Other values for the same tokens."""
        return Ragged(values, self.layout)

    def to(self, device: torch.device | str) -> Ragged:
        return Ragged(to_device_async(self.values, torch.device(device)), self.layout.to(device))

    def shift_right(self, start_id: int) -> Ragged:
        """What a decoder reads that judges its own source: a first token, then the source without its last one."""
        values = self.values.roll(1)
        values[self.layout.cu_seqlens[:-1].long()] = start_id
        return self.with_values(values)

    def sequences(self) -> list[Tensor]:
        """One tensor [n_i, …] a sequence."""
        return list(torch.split(self.values, list(self.layout.lengths_list)))

    def __len__(self) -> int:
        return len(self.layout)
