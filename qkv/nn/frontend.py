"""Front ends: the first module of a model, which maps raw input to hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from qkv import spec
from qkv.errors import InputError
from qkv.nn.char_cnn import CharacterEmbedding
from qkv.nn.embedding import PatchEmbedding, TokenEmbedding
from qkv.nn.ragged import Ragged

RawInput = Ragged | Tensor  # token ids [T] with their layout; images [B, channels, side, side]


class FrontEnd(Protocol):
    """Module that maps a batch of raw input to hidden states, possibly in another layout (one vector per patch)."""

    @property
    def max_length(self) -> int:
        """Maximum number of hidden states per sequence."""

    @property
    def token_weight(self) -> Tensor | None:
        """Embedding matrix that an output layer or another embedding may share; None: the input has no vocabulary."""

    def __call__(self, inputs: Any, token_type_ids: Tensor | None = None) -> Ragged:
        """Return the hidden states [T, width] of raw input; `token_type_ids` are for front ends with segments."""


_FRONT_ENDS: dict[type, Callable[[Any], FrontEnd]] = {
    spec.Embedding: TokenEmbedding,
    spec.CharacterEmbedding: CharacterEmbedding,
    spec.PatchEmbedding: PatchEmbedding,
}


def build_front_end(s: spec.Embedding | spec.PatchEmbedding | None, side: str = "source") -> FrontEnd:
    """Build the front end of a spec; `side` names the missing field in the message if there is none."""
    if s is None:
        raise InputError(
            f"the model has no {side}_embedding, which the {'encoder' if side == 'source' else 'decoder'} needs"
        )
    return _FRONT_ENDS[type(s)](s)


def build_token_embedding(s: spec.Embedding | None) -> TokenEmbedding:
    """Build the front end of a decoder, which always reads tokens."""
    front_end = build_front_end(s, "target")
    assert isinstance(front_end, TokenEmbedding)
    return front_end
