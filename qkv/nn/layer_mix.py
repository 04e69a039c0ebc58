"""One vector a token out of those of several layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError

_MAX_CONCAT_LAYERS = 4


class ScalarMix(nn.Module):
    """scale * sum_j softmax(weights)_j h_j over what goes into the first layer and what comes out of each (Peters et
    al. 2018, equation 1): a task learns which layers it needs of a body that stays as it is."""

    def __init__(self, num_layers: int):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(num_layers))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, layers: Sequence[Tensor]) -> Tensor:
        layer_weights = torch.softmax(self.weights, 0) * self.scale  # [layers]
        return torch.einsum("l,ltw->tw", layer_weights, torch.stack(list(layers)))  # [T, width]


def concat_last_four(layers: Sequence[Tensor]) -> Tensor:
    """The last four blocks' outputs side by side, or all where there are fewer: the best of the features that Devlin et
    al. 2019 (table 7) take from a body that stays as it is."""
    return torch.cat(list(layers[1:][-_MAX_CONCAT_LAYERS:]), -1)  # [T, num_concat_layers * width]


def num_concat_layers(s: spec.Model) -> int:
    """How many layers' vectors lie side by side in what a model's head reads."""
    backbone = _backbone_spec(s)
    return min(_MAX_CONCAT_LAYERS, backbone.num_layers) if s.feature_layers == "concat_last_4" and isinstance(backbone, spec.TransformerStack) else 1


def make_scalar_mix(s: spec.Model) -> ScalarMix | None:
    """A fresh mix where the head reads one; a body or a head that has no use for several layers is refused."""
    if s.feature_layers == "last":
        return None
    backbone = _backbone_spec(s)
    if not isinstance(backbone, spec.TransformerStack):
        raise InputError(f"{s.family}: of a recurrent body a head reads the last layer alone")
    if s.head is not None and s.head.kind == "lm":
        raise InputError(f"{s.family}: a head that writes reads the last layer alone")
    return ScalarMix(backbone.num_layers + 1) if s.feature_layers == "scalar_mix" else None


def _backbone_spec(s: spec.Model) -> spec.TransformerStack | spec.RecurrentEncoder | spec.RecurrentDecoder | None:
    return s.encoder if s.decoder is None else s.decoder
