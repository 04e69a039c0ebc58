"""Span corruption: the encoder reads a text with gaps, the decoder writes what is missing (Raffel et al. 2020)."""

from __future__ import annotations

from qkv import spec
from qkv.data.chance import Chance, Pieces
from qkv.data.spans import SPANS, Spans, corrupt
from qkv.objectives import seq2seq
from qkv.objectives.denoise import loss
from qkv.objectives.seq2seq import Inputs
from qkv.text.marks import Marks

__all__ = ["Inputs", "loss", "prepare"]


def prepare(pieces: Pieces, marks: Marks, chance: Chance, how: Spans = SPANS, *, model: spec.Model) -> Inputs:
    """Pieces of text alone; both sides get their end token here."""
    return seq2seq.inputs(corrupt(pieces, marks, chance, how), start=model.start, end=model.end)
