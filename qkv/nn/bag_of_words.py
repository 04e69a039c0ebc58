"""The encoder without layers, for bags of words and word vectors."""

from __future__ import annotations

from torch import nn

from qkv import spec
from qkv.nn.dropout import dropout
from qkv.nn.ragged import Ragged
from qkv.nn.stack import EncoderOutput


class BagOfWords(nn.Module):
    """Encoder whose hidden states are the embeddings themselves."""

    def __init__(self, s: spec.BagOfWords):
        super().__init__()
        self.spec = s

    def forward(self, x: Ragged) -> EncoderOutput:
        """Return the input, with dropout in training.  # [T, width]"""
        if self.training and self.spec.dropout:
            return EncoderOutput(x.with_values(dropout(x.values, self.spec.dropout)))
        return EncoderOutput(x)
