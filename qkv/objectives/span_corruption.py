"""Span corruption: the encoder reads a text with gaps, the decoder writes what is missing (Raffel et al. 2020)."""

from __future__ import annotations

from qkv import spec
from qkv.data.noise.span_corruption import DEFAULT_SPAN_CORRUPTION, SpanCorruptionConfig, corrupt_spans
from qkv.data.rng import CounterRNG, PackedChunks
from qkv.objectives import seq2seq
from qkv.objectives.denoising import loss
from qkv.objectives.seq2seq import Inputs
from qkv.tokenization.vocab_tables import VocabTables

__all__ = ["Inputs", "loss", "make_inputs"]


def make_inputs(chunks: PackedChunks, vocab_tables: VocabTables, rng: CounterRNG, config: SpanCorruptionConfig = DEFAULT_SPAN_CORRUPTION, *, model: spec.Model) -> Inputs:
    """Pieces of text alone; both sides get their end token here."""
    return seq2seq.make_inputs(corrupt_spans(chunks, vocab_tables, rng, config), bos_id=model.bos_id, eos_id=model.eos_id)
