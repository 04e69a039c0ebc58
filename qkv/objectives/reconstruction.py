"""Base class of objectives that corrupt the source and train the decoder to reconstruct the text or a part of it."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

from qkv.data.corpora.chunks import ChunkBatch
from qkv.data.rng import CounterRNG, PackedChunks
from qkv.data.template_batch import TemplateIds, apply_template
from qkv.nn import EncoderDecoder
from qkv.objectives import seq2seq
from qkv.objectives.base import Objective, TextContext
from qkv.objectives.loss import LossSum
from qkv.objectives.samples import reconstruction_sample
from qkv.objectives.seq2seq import Inputs
from qkv.recipe.objectives import ObjectiveConfig

ConfigT = TypeVar("ConfigT", bound=ObjectiveConfig)


def loss(model: EncoderDecoder, batch: Inputs, *, label_smoothing: float = 0.0) -> LossSum:
    """Return the negative log-likelihood of the target with its EOS token."""
    return LossSum(seq2seq.loss(model, batch, label_smoothing=label_smoothing), len(batch.labels))


class Reconstruction(Objective[ConfigT]):
    """An objective whose source is a corrupted text. Subclasses define the corruption and the target."""

    architectures = frozenset({"encoder-decoder"})
    supports_label_smoothing = True

    @abstractmethod
    def corrupt(self, chunks: PackedChunks, context: TextContext, rng: CounterRNG) -> Inputs:
        """Return source and target of chunks that have the tokenizer's special tokens, but for those at the end."""

    def prepare(self, batch: ChunkBatch, context: TextContext, rng: CounterRNG) -> Inputs:
        chunks, _ = apply_template(batch, self.template(context))
        return self.corrupt(chunks, context, rng)

    def losses(self, model: EncoderDecoder, inputs: Inputs, label_smoothing: float = 0.0) -> tuple[LossSum, ...]:
        return (loss(model, inputs, label_smoothing=label_smoothing),)

    def sample(self, model: EncoderDecoder, chunk: ChunkBatch, context: TextContext, rng: CounterRNG) -> str:
        return reconstruction_sample(model, context.tokenizer, self.prepare(chunk, context, rng))

    @staticmethod
    def template(context: TextContext) -> TemplateIds:
        """Return the special tokens before a text; `seq2seq.make_inputs` adds the EOS token to source and target."""
        ids, token_type_ids, text_token_types = context.template
        return TemplateIds((ids[0], ids[1], []), (token_type_ids[0], token_type_ids[1], []), text_token_types)
