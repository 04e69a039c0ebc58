"""Where a token stands: sinusoids (Vaswani et al. 2017, 3.5) and learned positions (Devlin et al. 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def sinusoids(length: int, width: int, base: float = 10000.0) -> Tensor:
    """PE(t, 2i) = sin(t / base^(2i/width)), PE(t, 2i + 1) = cos(t / base^(2i/width)).  # [length, width]"""
    even = torch.arange(0, width, 2, dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64)[:, None] / base ** (even / width)  # [length, ceil(width / 2)]
    table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width]
    return table.float()


class Sinusoid(nn.Module):
    """Fixed; never in a checkpoint."""

    table: Tensor

    def __init__(self, length: int, width: int):
        super().__init__()
        self.shape = (length, width)
        self.register_buffer("table", sinusoids(length, width), persistent=False)

    def fill(self) -> None:
        """Makes the table again where a model was built without memory of its own."""
        self.table = sinusoids(*self.shape)

    def forward(self, positions: Tensor) -> Tensor:
        return self.table[positions]  # [T, width]


class Learned(nn.Module):
    """A row of parameters a position."""

    def __init__(self, length: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, width))

    def forward(self, positions: Tensor) -> Tensor:
        return nn.functional.embedding(positions, self.weight)  # [T, width]
