"""One vector a token out of those of several layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_LAST = 4


class Mix(nn.Module):
    """scale * sum_j softmax(weights)_j h_j over what goes into the first layer and what comes out of each (Peters et
    al. 2018, equation 1): a task learns which layers it needs of a body that stays as it is."""

    def __init__(self, layers: int):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(layers))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, layers: Sequence[Tensor]) -> Tensor:
        shares = torch.softmax(self.weights, 0) * self.scale  # [layers]
        return torch.einsum("l,ltw->tw", shares, torch.stack(list(layers)))  # [T, width]


def last_four(layers: Sequence[Tensor]) -> Tensor:
    """The mean of the last four blocks' outputs, or of all where there are fewer."""
    return torch.stack(list(layers[1:][-_LAST:])).mean(0)  # [T, width]
