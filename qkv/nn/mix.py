"""One vector a token out of those of several layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError

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
    """The last four blocks' outputs side by side, or all where there are fewer: the best of the features that Devlin et
    al. 2019 (table 7) take from a body that stays as it is."""
    return torch.cat(list(layers[1:][-_LAST:]), -1)  # [T, joined * width]


def joined(s: spec.Model) -> int:
    """How many layers' vectors lie side by side in what a model's head reads."""
    body = _body(s)
    return min(_LAST, body.depth) if s.read == "last_four" and isinstance(body, spec.Stack) else 1


def mix_of(s: spec.Model) -> Mix | None:
    """A fresh mix where the head reads one; a body or a head that has no use for several layers is refused."""
    if s.read == "last":
        return None
    body = _body(s)
    if not isinstance(body, spec.Stack):
        raise InputError(f"{s.family}: of a recurrent body a head reads the last layer alone")
    if s.head is not None and s.head.kind == "lm":
        raise InputError(f"{s.family}: a head that writes reads the last layer alone")
    return Mix(body.depth + 1) if s.read == "mix" else None


def _body(s: spec.Model) -> spec.Stack | spec.Recurrent | spec.RecurrentDecoder | None:
    return s.encoder if s.decoder is None else s.decoder
