"""Low-rank adapters: matrices that stay as they are, each with a small product of two beside it (Hu et al. 2022).

A model with adapters is the same model with `spec.adapters`: parameters keep their names, and each adapted matrix has
two more, `into` (A in the paper) and `back` (B).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError, nearest
from qkv.nn.attention import Attention
from qkv.nn.block import Block
from qkv.nn.dropout import dropout
from qkv.nn.feedforward import FeedForward

LAYERS = ("q", "k", "v", "o", "up", "gate", "down")
OWN = ("into", "back")


class Adapted(nn.Linear):
    """W x + b + scale / rank * B A x. B is zero at the start, so that training begins where the model stands."""

    def __init__(self, linear: nn.Linear, s: spec.Adapters):
        nn.Module.__init__(self)  # the matrix is there already
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.share, self.dropout = s.scale / s.rank, s.dropout
        self.into = nn.Parameter(linear.weight.new_empty(s.rank, self.in_features))
        self.back = nn.Parameter(linear.weight.new_empty(self.out_features, s.rank))
        nn.init.kaiming_uniform_(self.into, a=math.sqrt(5))
        nn.init.zeros_(self.back)

    def forward(self, x: Tensor) -> Tensor:
        plain = F.linear(x, self.weight, self.bias)
        read = dropout(x, self.dropout) if self.training and self.dropout else x
        return plain + F.linear(F.linear(read, self.into), self.back) * self.share  # [T, out]

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """One matrix that does the same."""
        with torch.device("meta"):
            made = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        made.weight = nn.Parameter(self.weight + self.back @ self.into * self.share)
        made.bias = self.bias
        return made


def adapt(model: nn.Module, s: spec.Adapters) -> None:
    """Puts adapters on the layers of those names in every block, freshly drawn."""
    for name in s.matrices:
        if name not in LAYERS:
            raise InputError(f"adapters: there is no layer '{name}' to put them on; {nearest(name, LAYERS)}")
    if s.rank < 1 or not s.matrices:
        raise InputError("adapters: need a rank of 1 or more, and the names of the layers that they sit on")
    found = list(_places(model))
    for name in s.matrices:
        if not any(own == name for _, own, _ in found):
            raise InputError(f"adapters: no block of this model has a layer '{name}'; leave it out of their list")
    for module, name, linear in found:
        if name in s.matrices:
            setattr(module, name, Adapted(linear, s))


def merge(model: nn.Module) -> None:
    """Makes plain matrices of adapted ones."""
    for module, name, linear in list(_places(model)):
        if isinstance(linear, Adapted):
            setattr(module, name, linear.merged())


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Where an adapter may sit; heads are trained whole and need none."""
    for block in (m for m in model.modules() if isinstance(m, Block)):
        for part in (p for p in block.children() if isinstance(p, Attention | FeedForward)):
            yield from ((part, name, child) for name, child in part.named_children() if isinstance(child, nn.Linear))
