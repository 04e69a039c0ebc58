"""Denoising: the encoder reads a corrupted text, the decoder generates the original one (Lewis et al. 2020)."""

from __future__ import annotations

from qkv import spec
from qkv.data.noise.config import DEFAULT_DENOISING, DenoisingConfig
from qkv.data.noise.denoising import add_noise
from qkv.data.rng import CounterRNG, PackedChunks
from qkv.errors import InputError
from qkv.objectives import seq2seq
from qkv.objectives.base import TextContext
from qkv.objectives.reconstruction import Reconstruction
from qkv.recipe.objectives import DenoisingObjective
from qkv.tokenization.vocab_tables import VocabTables

_NOISE_ROOM = 16  # spare source tokens: one per this many, because a span of length 0 inserts a mask token


class DenoisingInputs(seq2seq.Inputs):
    """Source: the corrupted text; target: the original one."""

    __slots__ = ()


def make_inputs(
    chunks: PackedChunks,
    vocab_tables: VocabTables,
    rng: CounterRNG,
    config: DenoisingConfig = DEFAULT_DENOISING,
    *,
    model: spec.Model,
) -> DenoisingInputs:
    """Corrupt chunks and add the model's BOS and EOS tokens; the chunks have no EOS token yet."""
    noised = add_noise(chunks, vocab_tables, rng, config)
    return DenoisingInputs(*seq2seq.make_inputs(noised, bos_id=model.bos_id, eos_id=model.eos_id))


class Denoising(Reconstruction[DenoisingObjective]):
    """Reconstruct a text whose sentences are shuffled and whose spans are masked."""

    name = "denoising"
    config_class = DenoisingObjective
    inputs_class = DenoisingInputs

    def max_chunk_tokens(self, max_length: int, context: TextContext) -> int:
        return max_length - self.template(context).num_added_tokens - 1 - max(2, max_length // _NOISE_ROOM)  # 1: EOS

    def corrupt(self, chunks: PackedChunks, context: TextContext, rng: CounterRNG) -> DenoisingInputs:
        inputs = make_inputs(chunks, context.vocab_tables, rng, self.config, model=context.spec)
        if inputs.source.layout.max_length > context.max_input_length:
            message = f"spans of mean length {self.config.poisson_lambda} add more mask tokens than they remove tokens"
            remedy = "set it to 1 or more, or a smaller data.max_length"
            raise InputError(f"objective.denoising.poisson_lambda: {message}; {remedy}")
        return inputs
