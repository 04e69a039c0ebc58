"""Position schemes: sinusoids (Vaswani et al. 2017, 3.5), learned positions (Devlin et al. 2019), relative biases."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError


def sinusoids(length: int, width: int, base: float = 10000.0) -> Tensor:
    """PE(t, 2i) = sin(t / base^(2i/width)), PE(t, 2i + 1) = cos(t / base^(2i/width)).  # [length, width]"""
    # on the CPU even inside `torch.device("meta")`: the table is no parameter, so no checkpoint fills it later
    even_dims = torch.arange(0, width, 2, dtype=torch.float64, device="cpu")
    positions = torch.arange(length, dtype=torch.float64, device="cpu")[:, None]
    angles = positions / base ** (even_dims / width)  # [length, ceil(width / 2)]
    table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width]
    return table.float()


def sinusoids_concat(length: int, width: int) -> Tensor:
    """Return sinusoids with all sines before all cosines (Junczys-Dowmunt et al. 2018).  # [length, width]"""
    table = sinusoids(length, width)
    return torch.cat([table[:, 0::2], table[:, 1::2]], 1)


class SinusoidalPositions(nn.Module):
    """Sinusoidal position table; it is constant and not part of a checkpoint."""

    table: Tensor

    def __init__(self, length: int, width: int, concat: bool = False):
        super().__init__()
        table = sinusoids_concat(length, width) if concat else sinusoids(length, width)
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        return self.table[positions]  # [T, width]


class LearnedPositions(nn.Module):
    """Learned vector per position; the first `offset` rows are unused (the padding of RoBERTa and BART)."""

    def __init__(self, length: int, width: int, offset: int = 0):
        super().__init__()
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(offset + length, width))

    def init_weights(self, std: float | None) -> None:
        nn.init.normal_(self.weight, std=std or 0.02)

    def forward(self, positions: Tensor) -> Tensor:
        return nn.functional.embedding(positions + self.offset, self.weight)  # [T, width]


class RelativePositionBias(nn.Module):
    """Learned bias on the attention scores per head and distance bucket (Raffel et al. 2020, 2.1)."""

    def __init__(self, s: spec.RelativePositionBias, heads: int, causal: bool):
        super().__init__()
        max_exact = s.num_buckets // (2 if causal else 4)  # distances with a bucket of their own
        if max_exact < 1 or s.max_distance <= max_exact:
            reason = f"{s.num_buckets} buckets distinguish {max_exact} distances exactly"
            raise InputError(f"relative_position_bias: {reason}; max_distance must be larger, not {s.max_distance}")
        self.spec, self.causal = s, causal
        self.weight = nn.Parameter(torch.empty(s.num_buckets, heads))

    def init_weights(self, std: float | None) -> None:
        nn.init.normal_(self.weight, std=std or 0.02)

    def forward(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Return the bias of queries and keys at these positions of one sequence.  # [N], [M] -> [H, N, M]"""
        buckets = self.compute_bucket(key_positions[None] - query_positions[:, None])  # [N, M]
        return nn.functional.embedding(buckets, self.weight).permute(2, 0, 1)

    def compute_bucket(self, distance: Tensor) -> Tensor:
        """Return the bucket of each distance: one per short distance, logarithmic ranges for long ones.  # [N, M]"""
        num_buckets, shift = self.spec.num_buckets, torch.zeros_like(distance)
        if self.causal:
            abs_distance = -distance.clamp(max=0)
        else:  # half of the buckets for preceding keys, half for following ones
            num_buckets //= 2
            shift, abs_distance = torch.where(distance > 0, num_buckets, 0), distance.abs()
        max_exact = num_buckets // 2
        # in float32 and in this order: other rounding would move a distance at a bucket boundary
        ratio = (
            torch.log(abs_distance.float() / max_exact)
            / math.log(self.spec.max_distance / max_exact)
            * (num_buckets - max_exact)
        )
        far_bucket = (max_exact + ratio.long()).clamp(max=num_buckets - 1)
        return shift + torch.where(abs_distance < max_exact, abs_distance, far_bucket)
