"""Layer normalization (Ba et al. 2016) and RMS normalization (Zhang & Sennrich 2019)."""

from __future__ import annotations

from torch import nn

from qkv import spec


def build_norm(s: spec.Norm, width: int) -> nn.Module:
    """Build the norm of a spec."""
    if s.kind == "rms":
        return nn.RMSNorm(width, eps=s.eps)
    return nn.LayerNorm(width, eps=s.eps)
