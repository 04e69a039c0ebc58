"""Layer normalisation (Ba et al. 2016) and its form without mean (Zhang & Sennrich 2019)."""

from __future__ import annotations

from torch import nn

from qkv import spec


def build_norm(s: spec.Norm, width: int) -> nn.Module:
    if s.kind == "rms":
        return nn.RMSNorm(width, eps=s.eps)
    return nn.LayerNorm(width, eps=s.eps)
