"""Denoising: the encoder reads a text that was spoilt, the decoder writes it as it was (Lewis et al. 2020)."""

from __future__ import annotations

from qkv import spec
from qkv.data.noise.noising import DEFAULT_DENOISING, DenoisingConfig, add_noise
from qkv.data.rng import CounterRNG, PackedChunks
from qkv.nn import EncoderDecoder
from qkv.objectives import seq2seq
from qkv.objectives.loss import LossSum
from qkv.objectives.seq2seq import Inputs
from qkv.tokenization.vocab_tables import VocabTables


def make_inputs(chunks: PackedChunks, vocab_tables: VocabTables, rng: CounterRNG, config: DenoisingConfig = DEFAULT_DENOISING, *, model: spec.Model) -> Inputs:
    """Pieces without the end token, which both sides get here: BART's as <s> and the text."""
    return seq2seq.make_inputs(add_noise(chunks, vocab_tables, rng, config), bos_id=model.bos_id, eos_id=model.eos_id)


def loss(model: EncoderDecoder, batch: Inputs, *, label_smoothing: float = 0.0) -> LossSum:
    """Negative log-likelihood of the whole text, its end included."""
    return LossSum(seq2seq.loss(model, batch, label_smoothing=label_smoothing), len(batch.labels))
