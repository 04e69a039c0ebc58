"""Where a token stands: sinusoids (Vaswani et al. 2017, 3.5), learned positions (Devlin et al. 2019), distances."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError


def sinusoids(length: int, width: int, base: float = 10000.0) -> Tensor:
    """PE(t, 2i) = sin(t / base^(2i/width)), PE(t, 2i + 1) = cos(t / base^(2i/width)).  # [length, width]"""
    # on the CPU whatever the device in force: a model that is built without memory needs its table all the same
    even = torch.arange(0, width, 2, dtype=torch.float64, device="cpu")
    places = torch.arange(length, dtype=torch.float64, device="cpu")[:, None]
    angles = places / base ** (even / width)  # [length, ceil(width / 2)]
    table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width]
    return table.float()


def halves(length: int, width: int) -> Tensor:
    """The same numbers with all sines first, as Marian has them (Junczys-Dowmunt et al. 2018).  # [length, width]"""
    table = sinusoids(length, width)
    return torch.cat([table[:, 0::2], table[:, 1::2]], 1)


class Sinusoid(nn.Module):
    """Fixed; never in a checkpoint."""

    table: Tensor

    def __init__(self, length: int, width: int, in_halves: bool = False):
        super().__init__()
        table = halves(length, width) if in_halves else sinusoids(length, width)
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        return self.table[positions]  # [T, width]


class Learned(nn.Module):
    """A row of parameters a position; `offset` rows stand before the first (RoBERTa's and BART's padding)."""

    def __init__(self, length: int, width: int, offset: int = 0):
        super().__init__()
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(offset + length, width))

    def forward(self, positions: Tensor) -> Tensor:
        return nn.functional.embedding(positions + self.offset, self.weight)  # [T, width]


class Relative(nn.Module):
    """What distance adds to a score: a number a bucket and head (Raffel et al. 2020, 2.1)."""

    def __init__(self, s: spec.Relative, heads: int, causal: bool):
        super().__init__()
        exact = s.buckets // (2 if causal else 4)  # distances with a bucket each
        if exact < 1 or s.distance <= exact:
            raise InputError(f"{s.buckets} buckets tell {exact} distances apart; the furthest cannot be {s.distance}")
        self.spec, self.causal = s, causal
        self.weight = nn.Parameter(torch.empty(s.buckets, heads))

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """For queries and keys at these places of one sequence.  # [N], [M] -> [H, N, M]"""
        bucket = self.bucket(keys[None] - queries[:, None])  # [N, M]
        return nn.functional.embedding(bucket, self.weight).permute(2, 0, 1)

    def bucket(self, distance: Tensor) -> Tensor:
        """Near distances have a bucket each, far ones share them on a logarithmic scale.  # [N, M]"""
        buckets, shift = self.spec.buckets, torch.zeros_like(distance)
        if self.causal:
            back = -distance.clamp(max=0)
        else:  # one half looks back, the other ahead
            buckets //= 2
            shift, back = torch.where(distance > 0, buckets, 0), distance.abs()
        exact = buckets // 2
        # in float32 and in this order: another rounding would move a distance at a border into another bucket
        ratio = torch.log(back.float() / exact) / math.log(self.spec.distance / exact) * (buckets - exact)
        far = (exact + ratio.long()).clamp(max=buckets - 1)
        return shift + torch.where(back < exact, back, far)
