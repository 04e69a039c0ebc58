"""Ragged batches: the tokens of all sequences concatenated, [T, …], and their lengths, without padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from operator import index
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qkv.errors import InputError, describe_value


class TimeMajor(NamedTuple):
    """Order of packed tokens by time step, longest sequence first, as recurrent networks process them."""

    order: Tensor  # [B] sequences by decreasing length
    permutation: Tensor  # [T] packed index of each time-major token
    inverse: Tensor  # [T] time-major index of each packed token
    batch_sizes: list[int]  # number of sequences with more than t tokens, per step t
    order_list: list[int]  # `order` as host integers


PooledToken = Literal["first", "last"]
_KERNEL_TILE = 128


class PooledTokens(NamedTuple):
    """One token of each sequence."""

    indices: Tensor  # [B] their packed indices
    layout: BatchLayout  # layout of a batch of only these tokens


class BatchLayout:
    """Lengths, offsets and positions of the sequences of a packed batch, on the host and on the device.

    All layers share one layout, and kernels cache in it what they compute about it (`plan_cache`).

    CUDA graphs: a graph is captured with one layout and replayed for others. `mark_static` declares that: kernels then
    read the lengths on the device only, and their plans are part of the graph. `copy_from` writes the numbers of the
    next batch into the tensors that the graph reads; `can_copy_from` is False if some code has used the lengths on the
    host. `qkv.train.perf.static_batch` pads batches to common numbers of tokens and sequences.
    """

    is_static: bool = False  # other batches with as many tokens and sequences will be copied into this layout

    def __init__(self, seq_lens: Sequence[int], device: torch.device | str = "cpu"):
        lengths = np.asarray(seq_lens, dtype=np.int64)
        self.lengths_list: tuple[int, ...] = tuple(lengths.tolist())
        if min(self.lengths_list, default=0) < 1:
            raise InputError("a batch needs at least one sequence, and each sequence at least one token")
        self.num_tokens = sum(self.lengths_list)
        self.max_length = self.padded_length = max(self.lengths_list)
        self.is_uniform = min(self.lengths_list) == self.max_length  # all sequences have the same length
        ends = lengths.cumsum()
        positions = np.arange(self.num_tokens) - np.repeat(ends - lengths, lengths)
        packed = torch.from_numpy(np.concatenate([lengths, [0], ends, positions]))
        # reading them back from a GPU would wait for it
        self.host_tensors = torch.split(packed, [len(self), len(self) + 1, self.num_tokens])
        self._host_uses: set[str] = set()  # uses of the lengths on the host; shared by all copies of a static layout
        self._move_to(torch.device(device))

    def _move_to(self, device: torch.device) -> None:
        packed = to_device_async(torch.cat(self.host_tensors), device)  # one copy for all three
        self._set_device_tensors(*torch.split(packed, [len(tensor) for tensor in self.host_tensors]))

    def _set_device_tensors(self, lengths: Tensor, cu_seqlens: Tensor, positions: Tensor) -> None:
        self.lengths, self.positions = lengths, positions  # [B], [T] position in its sequence
        self.cu_seqlens = cu_seqlens.to(torch.int32)  # [B + 1]
        self.plan_cache: dict[Any, Any] = {}  # results that depend on the layout only, shared by all layers

    def __len__(self) -> int:
        return len(self.lengths_list)

    @property
    def device(self) -> torch.device:
        return self.lengths.device

    def padded_index(self) -> Tensor:
        """Return the index of each token in the flattened padded batch [B * padded_length].  # [T]"""
        if "padded_index" not in self.plan_cache:
            self.plan_cache["padded_index"] = self.sequence_ids() * self.padded_length + self.positions
        index: Tensor = self.plan_cache["padded_index"]
        return index

    def sequence_ids(self) -> Tensor:
        """Return the sequence of each token.  # [T]"""
        indices = torch.arange(len(self), device=self.device)
        return indices.repeat_interleave(self.lengths, output_size=self.num_tokens)

    def valid_mask(self) -> Tensor:
        """Return a mask that is True where a padded batch holds a token.  # [B, padded_length]"""
        if "valid_mask" not in self.plan_cache:
            self.plan_cache["valid_mask"] = torch.arange(self.padded_length, device=self.device) < self.lengths[:, None]
        mask: Tensor = self.plan_cache["valid_mask"]
        return mask

    def pooled_tokens(self, token: PooledToken) -> PooledTokens:
        """Return the first or last token of each sequence."""
        if token not in self.plan_cache:
            indices = (self.cu_seqlens[:-1] if token == "first" else self.cu_seqlens[1:] - 1).long()  # [B]
            self.plan_cache[token] = PooledTokens(indices, self._single_tokens())
        pooled: PooledTokens = self.plan_cache[token]
        return pooled

    def _single_tokens(self) -> BatchLayout:
        """Return a layout with one token per sequence, made on the device, as a graph that is captured needs it."""
        layout = BatchLayout([1] * len(self))
        lengths = torch.ones_like(self.lengths)
        indices = torch.arange(len(self) + 1, device=self.device)
        layout._set_device_tensors(lengths, indices, torch.zeros_like(lengths))
        return layout

    def repeat(self, times: int) -> BatchLayout:
        """Return the layout of a batch that is concatenated with itself, made on the device."""
        cache_key = ("repeat", times)
        if cache_key not in self.plan_cache:
            repeated = copy(self)
            repeated.lengths_list, repeated.num_tokens = self.lengths_list * times, self.num_tokens * times
            lengths, cu_seqlens, positions = self.host_tensors
            repeated.host_tensors = (
                lengths.repeat(times),
                _repeat_offsets(cu_seqlens, self.num_tokens, times),
                positions.repeat(times),
            )
            repeated._set_device_tensors(
                self.lengths.repeat(times),
                _repeat_offsets(self.cu_seqlens, self.num_tokens, times),
                self.positions.repeat(times),
            )
            self.plan_cache[cache_key] = repeated
        layout: BatchLayout = self.plan_cache[cache_key]
        return layout

    def to(self, device: torch.device | str) -> BatchLayout:
        """Return a copy on a device, without cached plans."""
        moved = copy(self)
        moved._move_to(torch.device(device))
        return moved

    def mark_static(self, padded_length: int | None = None) -> BatchLayout:
        """Mark this layout as a placeholder into which batches with as many tokens and sequences will be copied.

        Uniform length can then no longer be assumed. No sequence of these batches is longer than `padded_length`, or
        without it, than the longest one of this layout.
        """
        self.is_static, self.is_uniform = True, False
        self.padded_length = padded_length or self.max_length
        return self

    @property
    def kernel_max_length(self) -> int:
        """Maximum length for variable-length kernels, rounded up to the tile that they process anyway."""
        return -(-self.padded_length // _KERNEL_TILE) * _KERNEL_TILE

    def copy_from(self, other: BatchLayout) -> None:
        """Overwrite the device tensors with those of another layout; cached plans are not updated."""
        for destination, source in (
            (self.lengths, other.lengths),
            (self.cu_seqlens, other.cu_seqlens),
            (self.positions, other.positions),
        ):
            destination.copy_(source)

    @property
    def can_copy_from(self) -> bool:
        """Whether everything that was computed about this layout was computed on the device."""
        return not self._host_uses

    def use_on_host(self, purpose: str) -> None:
        """Declare that the lengths on the host are used, so that no other layout can be copied into this one."""
        self._host_uses.add(purpose)

    def time_major(self) -> TimeMajor:
        """Return the order of the tokens by time step."""
        self.use_on_host("time_major")
        if "time_major" not in self.plan_cache:
            lengths = torch.tensor(self.lengths_list, dtype=torch.long)
            order = torch.sort(lengths, descending=True, stable=True).indices
            starts = torch.tensor([0, *accumulate(self.lengths_list)][:-1], dtype=torch.long)
            batch_sizes = [int((lengths > t).sum()) for t in range(self.max_length)]
            permutation = torch.cat([starts[order[:n]] + t for t, n in enumerate(batch_sizes)])
            inverse = torch.empty_like(permutation)
            inverse[permutation] = torch.arange(self.num_tokens)
            device = self.device
            self.plan_cache["time_major"] = TimeMajor(
                order.to(device), permutation.to(device), inverse.to(device), batch_sizes, order.tolist()
            )
        cached: TimeMajor = self.plan_cache["time_major"]
        return cached


def _repeat_offsets(cu_seqlens: Tensor, num_tokens: int, times: int) -> Tensor:
    """Return the offsets of a batch that is concatenated with itself.  # [B + 1] -> [times * B + 1]"""
    return torch.cat([cu_seqlens, *(cu_seqlens[1:] + i * num_tokens for i in range(1, times))])


def to_device_async(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to a device; to a GPU from pinned memory, because other copies wait for all queued work.

    Not while a CUDA graph is recorded: a replay would read the pinned memory again, which may have been reused.
    """
    if device.type != "cuda" or tensor.is_cuda or torch.cuda.is_current_stream_capturing():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass
class Ragged:
    """Values [T, …] of the tokens of all sequences, one sequence after the other, with their layout."""

    values: Tensor
    layout: BatchLayout

    @staticmethod
    def pack(sequences: Iterable[Tensor]) -> Ragged:
        """Pack sequences [n_i, …] of any lengths."""
        if not isinstance(sequences, Iterable) or (isinstance(sequences, Tensor) and not sequences.dim()):
            raise _not_tensors(sequences)
        tensors = list(sequences)
        if not tensors or not all(isinstance(p, Tensor) and p.dim() for p in tensors):
            raise _not_tensors(sequences)
        if any(p.shape[1:] != tensors[0].shape[1:] for p in tensors):
            raise InputError("sequences: all sequences need the same shape after their length")
        return Ragged(torch.cat(tensors), BatchLayout([len(p) for p in tensors], tensors[0].device))

    @staticmethod
    def from_lengths(values: Tensor, lengths: Sequence[int] | Tensor) -> Ragged:
        """Make a batch of packed values [T, …] and lengths [B]."""
        if not isinstance(values, Tensor) or not values.dim():
            raise _not_tensors(values)
        layout = BatchLayout(_check_lengths(lengths), values.device)
        if layout.num_tokens != len(values):
            raise InputError(
                f"{len(values)} tokens cannot be split into sequences of {layout.num_tokens} tokens in total"
            )
        return Ragged(values, layout)

    @staticmethod
    def from_padded(padded: Tensor, lengths: Sequence[int] | Tensor) -> Ragged:
        """Pack a padded batch [B, N, …].

        Args:
            padded: token ids, for example those of a tokenizer of another library.
            lengths: the number of real tokens of each row [B], or a mask [B, N] that is true where a token is real.
        """
        if not isinstance(padded, Tensor) or padded.dim() < 2:
            raise _not_tensors(padded)
        if isinstance(lengths, Tensor) and lengths.shape == padded.shape[:2]:
            valid_mask = lengths.bool()  # [B, N]
            return Ragged(padded[valid_mask], BatchLayout(valid_mask.sum(1).tolist(), padded.device))
        layout = BatchLayout(_check_lengths(lengths), padded.device)
        if len(layout) != padded.shape[0] or layout.max_length > padded.shape[1]:
            raise InputError(
                f"lengths {list(layout.lengths_list)} do not fit a padded batch of {list(padded.shape[:2])}"
            )
        valid_mask = torch.arange(padded.shape[1], device=padded.device) < layout.lengths[:, None]  # [B, N]
        return Ragged(padded[valid_mask], layout)

    def to_padded(self, fill_value: float = 0.0) -> Tensor:
        """Return a padded batch with `fill_value` after the end of each sequence.  # [B, padded_length, …]"""
        shape = (len(self.layout) * self.layout.padded_length, *self.values.shape[1:])
        flat = self.values.new_full(shape, fill_value).index_copy(0, self.layout.padded_index(), self.values)
        return flat.view(len(self.layout), self.layout.padded_length, *shape[1:])

    def to_left_padded(self) -> Tensor:
        """Return padded sequences that end in the same column; the padding repeats real values.  # [B, max_length, ...]

        Nothing waits for the device.
        """
        layout = self.layout
        sizes = len(layout), layout.max_length, *self.values.shape[1:]
        if layout.num_tokens == sizes[0] * sizes[1]:
            return self.values.view(sizes)
        if "left_padded_index" not in layout.plan_cache:
            distance_to_end = torch.arange(layout.max_length, 0, -1, device=layout.device)
            index = (layout.cu_seqlens[1:, None] - distance_to_end).clamp(min=0)  # [B, max_length]
            layout.plan_cache["left_padded_index"] = index.flatten()
        return self.values.index_select(0, layout.plan_cache["left_padded_index"]).view(sizes)

    def with_values(self, values: Tensor) -> Ragged:
        """Return other values for the same tokens."""
        return Ragged(values, self.layout)

    def to_tokens(self) -> Ragged:
        """Return the values of all tokens of the input; several tokens can be one word, which has one value."""
        return self

    def repeat(self, times: int) -> Ragged:
        """Return the batch concatenated with itself."""
        repeats = (times, *(1 for _ in self.values.shape[1:]))
        return Ragged(self.values.repeat(repeats), self.layout.repeat(times))

    def extend(self, layout: BatchLayout) -> Ragged:
        """Return the batch with zeros as the values of the sequences that `layout` has in addition."""
        return Ragged(pad_rows(self.values, layout.num_tokens), layout)

    def to(self, device: torch.device | str) -> Ragged:
        """Return a copy on a device."""
        return Ragged(to_device_async(self.values, torch.device(device)), self.layout.to(device))

    def shift_right(self, start_id: int) -> Ragged:
        """Return each sequence shifted by one token: `start_id`, then all tokens but the last."""
        values = self.values.roll(1)
        values[self.layout.cu_seqlens[:-1].long()] = start_id
        return self.with_values(values)

    def sequences(self) -> list[Tensor]:
        """Return one tensor [n_i, …] per sequence."""
        return list(torch.split(self.values, list(self.layout.lengths_list)))

    def mean(self) -> Tensor:
        """Return the mean over the tokens of each sequence, summed in float32.  # [T, width] -> [B, width]

        It reads the lengths on the device, so that a CUDA graph can be replayed for other lengths.
        """
        values = self.values if self.values.dtype == torch.float64 else self.values.float()
        return self.sum_sequences(values) / self.layout.lengths[:, None]

    def sum_sequences(self, values: Tensor) -> Tensor:
        """Return the sum over the tokens of each sequence of values [T, …].  # [B, …]"""
        zeros = values.new_zeros(len(self.layout), *values.shape[1:])
        return zeros.index_add(0, self.layout.sequence_ids(), values)

    def max(self) -> Tensor:
        """Return the maximum over the tokens of each sequence, per entry.  # [T, width] -> [B, width]"""
        index = self.layout.sequence_ids()[:, None].expand_as(self.values)
        lowest = self.values.new_full((len(self.layout), self.values.shape[1]), -torch.inf)
        return lowest.scatter_reduce(0, index, self.values, "amax")

    def __len__(self) -> int:
        return len(self.layout)


def pad_rows(values: Tensor, num_rows: int, fill_value: float = 0) -> Tensor:
    """Return `values` with added rows, `num_rows` in all.  # [T, …] -> [num_rows, …]"""
    return torch.cat([values, values.new_full((num_rows - len(values), *values.shape[1:]), fill_value)])


def _check_lengths(lengths: Any) -> list[int]:
    try:
        return [index(length) for length in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]
    except TypeError:
        message = f"expected whole numbers, one per sequence, not {describe_value(lengths)}"
        raise InputError(f"lengths: {message}") from None


def _not_tensors(value: object) -> InputError:
    return InputError(f"expected a list of tensors, one per sequence, or a tensor, not {describe_value(value)}")
