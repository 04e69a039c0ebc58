"""Span corruption: the encoder reads a text with masked spans, the decoder generates the spans (Raffel et al. 2020)."""

from __future__ import annotations

from qkv import spec
from qkv.data.noise.config import DEFAULT_SPAN_CORRUPTION, SpanCorruptionConfig
from qkv.data.noise.span_corruption import corrupt_spans, max_chunk_tokens
from qkv.data.rng import CounterRNG, PackedChunks
from qkv.objectives import seq2seq
from qkv.objectives.base import TextContext
from qkv.objectives.reconstruction import Reconstruction
from qkv.recipe.objectives import SpanCorruptionObjective
from qkv.tokenization.vocab_tables import VocabTables


class SpanCorruptionInputs(seq2seq.Inputs):
    """Source: the text with a sentinel per masked span; target: each sentinel followed by its span."""

    __slots__ = ()


def make_inputs(
    chunks: PackedChunks,
    vocab_tables: VocabTables,
    rng: CounterRNG,
    config: SpanCorruptionConfig = DEFAULT_SPAN_CORRUPTION,
    *,
    model: spec.Model,
) -> SpanCorruptionInputs:
    """Mask spans and add the model's BOS and EOS tokens; the chunks have no EOS token yet."""
    corrupted = corrupt_spans(chunks, vocab_tables, rng, config)
    return SpanCorruptionInputs(*seq2seq.make_inputs(corrupted, bos_id=model.bos_id, eos_id=model.eos_id))


class SpanCorruption(Reconstruction[SpanCorruptionObjective]):
    """Generate the masked spans of a text."""

    name = "span_corruption"
    config_class = SpanCorruptionObjective
    inputs_class = SpanCorruptionInputs

    def max_chunk_tokens(self, max_length: int, context: TextContext) -> int:
        max_source = max_chunk_tokens(max_length, self.config) - self.template(context).num_added_tokens
        return min(max_source, context.max_input_length - 2)

    def corrupt(self, chunks: PackedChunks, context: TextContext, rng: CounterRNG) -> SpanCorruptionInputs:
        return make_inputs(chunks, context.vocab_tables, rng, self.config, model=context.spec)
