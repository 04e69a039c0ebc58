"""Linear layers for decoding on a CPU: the weight in the layout that is read fastest.

Several rows read it in the layout of oneDNN's kernels, which reorder it in each call otherwise; one row reads the
transposed weight, whose product is a sum of its rows, a fifth faster than any other.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.nn.feedforward import ACTIVATIONS

_ROWS = 8  # the layout for this number of rows serves hundreds within a few percent of their own
_MAX_ERROR = 1e-4  # of the probe, whose outputs are of the order of 1

# activations that oneDNN applies to the product: name here -> its name and algorithm there
_FUSED_ACTIVATIONS = {
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
    "tanh": ("tanh", ""),
}


class PackedLinear(nn.Module):
    """A float32 linear layer for inference only; its values are those of the layer it replaces.

    The weight is that of the layer until a step needs another layout: transposed for one row, packed for more, which
    it stays then. It holds one copy of the weight at most.
    """

    def __init__(self, linear: nn.Linear, *, waits: bool = False) -> None:
        """Make a layer; one that waits is packed by `pack`, rather than by a call with several rows."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.stored = linear.weight.detach()  # [out, in], transposed [in, out], or packed
        self.layout: Literal["plain", "transposed", "packed"] = "plain"
        self.waits = waits

    def pack(self) -> None:
        """Bring the weight into the layout for several rows."""
        if self.layout != "packed":
            plain = self.stored if self.layout == "plain" else self.stored.t()
            self.stored = torch.ops.mkldnn._reorder_linear_weight(plain.contiguous(), _ROWS)
            self.layout = "packed"

    def forward(self, x: Tensor) -> Tensor:
        """[R, in] -> [R, out]"""
        if self.layout != "packed" and len(x) > 1 and not self.waits:
            self.pack()
        if self.layout == "packed":
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.stored, self.bias, "none", [], "")
            return out
        if self.layout == "plain" and len(x) > 1:
            return F.linear(x, self.stored, self.bias)
        if self.layout == "plain":
            self.stored, self.layout = self.stored.t().contiguous(), "transposed"
        return torch.mm(x, self.stored) if self.bias is None else torch.addmm(self.bias, x, self.stored)

    def forward_activation(self, x: Tensor, name: str) -> Tensor:
        """Return an activation function of the product.  # [R, in] -> [R, out]"""
        if self.layout != "packed":
            return ACTIVATIONS[name](self.forward(x))
        attribute, algorithm = _FUSED_ACTIVATIONS[name]
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.stored, self.bias, attribute, [], algorithm)
        return out

    def forward_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the product plus a residual [R, out].  # [R, in] -> [R, out]"""
        if self.layout != "packed":
            return self.forward(x).add_(residual)
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.stored, self.bias, "add")
        return out


@cache
def can_pack() -> bool:
    """Return whether this build of PyTorch has the packed kernels, and they compute what a plain layer computes."""
    if not torch._C._has_mkldnn:
        return False
    linear = nn.Linear(40, 24, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for seed, parameter in enumerate((linear.weight, linear.bias)):
            nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(seed))
        x = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))
        residual, expected = x[:, :24].contiguous(), F.linear(x, linear.weight, linear.bias)
        try:
            packed = PackedLinear(linear)
            pairs = [(packed(x), expected), (packed.forward_add(x, residual), expected + residual)]
            pairs += [(packed.forward_activation(x, "gelu_tanh"), F.gelu(expected, approximate="tanh"))]
        except (RuntimeError, AttributeError):
            return False
    return all(bool((output - reference).abs().max() < _MAX_ERROR) for output, reference in pairs)
