"""Combination of the hidden states of several layers into one vector per token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError

NUM_LAST_LAYERS = 4  # "the last four": the best feature-based setting of Devlin et al. 2019, table 7


class ScalarMix(nn.Module):
    """Learned weighted mean of the embedding and all layers (Peters et al. 2018, equation 1).

    scale * sum_j softmax(weights)_j h_j: the task learns which layers of a frozen backbone it needs.
    """

    def __init__(self, num_layers: int):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(num_layers))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, layers: Sequence[Tensor]) -> Tensor:
        layer_weights = torch.softmax(self.weights, 0) * self.scale  # [layers]
        return torch.einsum("l,ltw->tw", layer_weights, torch.stack(list(layers)))  # [T, width]


def last_layers(hidden_states: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of the last four blocks, or of all if there are fewer.

    `hidden_states` begins with the embedding, which is no block and never part of the result.
    """
    return list(hidden_states[1:][-NUM_LAST_LAYERS:])  # [T, width] each


def concat_last_layers(hidden_states: Sequence[Tensor]) -> Tensor:
    """Concatenate the outputs of the last four blocks."""
    return torch.cat(last_layers(hidden_states), -1)  # [T, num_concat_layers * width]


def num_concat_layers(s: spec.Model) -> int:
    """Return the number of layers that are concatenated in the input of a model's head."""
    backbone = _backbone_spec(s)
    if s.feature_layers == "concat_last_4" and isinstance(backbone, spec.TransformerStack | spec.BiLM):
        return min(NUM_LAST_LAYERS, _num_layers(backbone))
    return 1


def _num_layers(backbone: spec.TransformerStack | spec.BiLM) -> int:
    return backbone.layers if isinstance(backbone, spec.BiLM) else backbone.num_layers


def make_scalar_mix(s: spec.Model) -> ScalarMix | None:
    """Return a newly initialized mix if the head reads one; None otherwise.

    Other recurrent backbones than ELMo's and language model heads support the last layer only.
    """
    if s.feature_layers == "last":
        return None
    backbone = _backbone_spec(s)
    if not isinstance(backbone, spec.TransformerStack | spec.BiLM):
        raise InputError(f"{s.family}: the head of this backbone reads its last layer only; set feature_layers to last")
    if s.head is not None and s.head.kind == "lm":
        raise InputError(f"{s.family}: a language model head reads the last layer only; set feature_layers to last")
    return ScalarMix(_num_layers(backbone) + 1) if s.feature_layers == "scalar_mix" else None


def _backbone_spec(s: spec.Model) -> object:
    return s.encoder if s.decoder is None else s.decoder
