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
    alive: list[int]  # how many sequences reach step t
    rows: list[int]  # `order`, on the host


End = Literal["first", "last"]
_ENDS: tuple[End, ...] = ("first", "last")
_TILE = 128


class Ends(NamedTuple):
    """One token of each sequence."""

    rows: Tensor  # [B] where they lie
    layout: Layout  # of these tokens alone


class Layout:
    """Where each sequence lies in a packed batch, on the host and on the device; shared by all layers."""

    framed: bool = False  # others with as many tokens and sequences come in its place; see `qkv.train.frame`

    def __init__(self, sizes: Sequence[int], device: torch.device | str = "cpu"):
        self.sizes = tuple(int(n) for n in sizes)
        if min(self.sizes, default=0) < 1:
            raise InputError("a batch needs at least one sequence, and each sequence at least one token")
        self.total = sum(self.sizes)
        self.longest = max(self.sizes)
        self.even = min(self.sizes) == self.longest  # all equally long
        lengths = torch.tensor(self.sizes, dtype=torch.long)
        offsets = F.pad(lengths.cumsum(0), (1, 0))
        places = torch.arange(self.total) - offsets[:-1].repeat_interleave(lengths)
        self.host = lengths, offsets, places  # kept where they were made: asking the device would wait for it
        self._lie_on(torch.device(device))

    def _lie_on(self, device: torch.device) -> None:
        there = sent(torch.cat(self.host), device)  # one copy for all three
        own = [len(part) for part in self.host]
        self.lengths, offsets, self.positions = torch.split(there, own)  # [B], [B + 1], [T] place in its own sequence
        self.offsets = offsets.to(torch.int32)
        self.plans: dict[Any, Any] = {}  # what kernels worked out about this layout, once for all layers

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def device(self) -> torch.device:
        return self.lengths.device

    def slots(self) -> Tensor:
        """Each token's place in the flattened [B * longest] padded form.  # [T]"""
        if "slots" not in self.plans:
            rows = torch.arange(len(self)).repeat_interleave(torch.tensor(self.sizes, dtype=torch.long))
            self.plans["slots"] = rows.to(self.device) * self.longest + self.positions
        slots: Tensor = self.plans["slots"]
        return slots

    def real(self) -> Tensor:
        """True where a padded form holds a token.  # [B, longest]"""
        if "real" not in self.plans:
            self.plans["real"] = torch.arange(self.longest, device=self.device) < self.lengths[:, None]
        real: Tensor = self.plans["real"]
        return real

    def ends(self, which: End) -> Ends:
        if which not in self.plans:
            self.plans[which] = Ends(self._rows(which), Layout([1] * len(self), self.device))
        found: Ends = self.plans[which]
        return found

    def _rows(self, which: End) -> Tensor:
        return (self.offsets[:-1] if which == "first" else self.offsets[1:] - 1).long()  # [B]

    def to(self, device: torch.device | str) -> Layout:
        moved = copy(self)
        moved._lie_on(torch.device(device))
        return moved

    def in_frame(self) -> Layout:
        """Says of itself that others, of as many tokens and sequences, come in its place; being even is then chance."""
        self.framed, self.even = True, False
        return self

    @property
    def reach(self) -> int:
        """The longest that a variable-length kernel is told of, which looks at that many keys together anyway."""
        return -(-self.longest // _TILE) * _TILE

    def refill(self, other: Layout) -> None:
        """Another's places, written where a recording reads these; what else was planned stays as it is."""
        for mine, its in (
            (self.lengths, other.lengths),
            (self.offsets, other.offsets),
            (self.positions, other.positions),
        ):
            mine.copy_(its)
        for which in _ENDS:
            if which in self.plans:
                self.plans[which].rows.copy_(other._rows(which))

    @property
    def refillable(self) -> bool:
        """Whether nothing was planned about it that `refill` leaves as it is."""
        return all(which in _ENDS and not ends.layout.plans for which, ends in self.plans.items())

    def time_major(self) -> TimeMajor:
        if "time" not in self.plans:
            sizes = torch.tensor(self.sizes, dtype=torch.long)
            order = torch.sort(sizes, descending=True, stable=True).indices
            starts = torch.tensor([0, *accumulate(self.sizes)][:-1], dtype=torch.long)
            alive = [int((sizes > t).sum()) for t in range(self.longest)]
            permutation = torch.cat([starts[order[:n]] + t for t, n in enumerate(alive)])
            inverse = torch.empty_like(permutation)
            inverse[permutation] = torch.arange(self.total)
            on = self.device
            self.plans["time"] = TimeMajor(order.to(on), permutation.to(on), inverse.to(on), alive, order.tolist())
        found: TimeMajor = self.plans["time"]
        return found


def sent(tensor: Tensor, device: torch.device) -> Tensor:
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
    layout: Layout

    @staticmethod
    def pack(sequences: Iterable[Tensor]) -> Ragged:
        """Sequences [n_i, …] of any lengths, one after the other."""
        parts = list(sequences)
        return Ragged(torch.cat(parts), Layout([len(p) for p in parts], parts[0].device))

    @staticmethod
    def of(values: Tensor, lengths: Sequence[int] | Tensor) -> Ragged:
        """Packed values [T, …] with their lengths [B]."""
        sizes = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        layout = Layout(sizes, values.device)
        if layout.total != len(values):
            raise InputError(f"{len(values)} tokens cannot be cut into sequences of {layout.total} in all")
        return Ragged(values, layout)

    @staticmethod
    def from_padded(padded: Tensor, lengths: Sequence[int] | Tensor) -> Ragged:
        """From what users have: [B, N, …] and the number of real tokens in each row."""
        sizes = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        layout = Layout(sizes, padded.device)
        if len(layout) != padded.shape[0] or layout.longest > padded.shape[1]:
            raise InputError(f"lengths {list(layout.sizes)} do not fit a padded batch of {list(padded.shape[:2])}")
        real = torch.arange(padded.shape[1], device=padded.device) < layout.lengths[:, None]  # [B, N]
        return Ragged(padded[real], layout)

    def to_padded(self, fill: float = 0.0) -> Tensor:
        """[B, longest, …] with `fill` behind each sequence's end."""
        shape = (len(self.layout) * self.layout.longest, *self.values.shape[1:])
        flat = self.values.new_full(shape, fill).index_copy(0, self.layout.slots(), self.values)
        return flat.view(len(self.layout), self.layout.longest, *shape[1:])

    def like(self, values: Tensor) -> Ragged:
        """Other values for the same tokens."""
        return Ragged(values, self.layout)

    def to(self, device: torch.device | str) -> Ragged:
        return Ragged(sent(self.values, torch.device(device)), self.layout.to(device))

    def shifted(self, first: int) -> Ragged:
        """What a decoder reads that judges its own source: a first token, then the source without its last one."""
        values = self.values.roll(1)
        values[self.layout.offsets[:-1].long()] = first
        return self.like(values)

    def sequences(self) -> list[Tensor]:
        """One tensor [n_i, …] a sequence."""
        return list(torch.split(self.values, list(self.layout.sizes)))

    def __len__(self) -> int:
        return len(self.layout)
