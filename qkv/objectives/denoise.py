"""Denoising: the encoder reads a text that was spoilt, the decoder writes it as it was (Lewis et al. 2020)."""

from __future__ import annotations

from qkv import spec
from qkv.data.chance import Chance, Pieces
from qkv.data.corruption import NOISE, Noise, spoil
from qkv.nn import EncoderDecoder
from qkv.objectives import seq2seq
from qkv.objectives.seq2seq import Inputs
from qkv.objectives.term import Term
from qkv.text.marks import Marks


def prepare(pieces: Pieces, marks: Marks, chance: Chance, how: Noise = NOISE, *, model: spec.Model) -> Inputs:
    """Pieces without the end token, which both sides get here: BART's as <s> and the text."""
    return seq2seq.inputs(spoil(pieces, marks, chance, how), start=model.start, end=model.end)


def loss(model: EncoderDecoder, batch: Inputs, *, smoothing: float = 0.0) -> Term:
    """Negative log-likelihood of the whole text, its end included."""
    return Term(seq2seq.loss(model, batch, smoothing=smoothing), len(batch.labels))
