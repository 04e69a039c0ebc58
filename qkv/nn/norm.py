"""Layer (Ba et al. 2016), RMS (Zhang & Sennrich 2019) and batch normalization (Ioffe & Szegedy 2015)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv import spec


def build_norm(s: spec.Norm, width: int) -> nn.Module:
    """Build the norm of a spec."""
    if s.kind == "rms":
        return nn.RMSNorm(width, eps=s.eps)
    return nn.LayerNorm(width, eps=s.eps)


class BatchNorm(nn.Module):
    """Batch normalization of vectors; in training, a batch of one vector is normalized as in eval mode.

    Unlike `nn.BatchNorm1d` it counts no batches, so that its state has floating-point numbers only.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))
        self.register_buffer("running_mean", torch.empty(width))
        self.register_buffer("running_var", torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as the identity."""
        for ones, zeros in ((self.weight, self.bias), (self.running_var, self.running_mean)):
            nn.init.ones_(ones)
            nn.init.zeros_(zeros)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each feature.  # [B, width]"""
        use_batch = self.training and len(x) > 1
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training=use_batch)
