"""Bidirectional language modeling: predict the next word and the previous one with one softmax (Peters et al. 2018).

Words that are no tokens of the vocabulary are read letter by letter, but predicted as the unknown token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qkv import spec
from qkv.data.corpora.chunks import ChunkBatch
from qkv.data.corpora.segments import Segments
from qkv.data.rng import CounterRNG, PackedChunks
from qkv.data.template_batch import apply_template
from qkv.errors import InputError
from qkv.nn import Ragged
from qkv.nn.bilm import NUM_DIRECTIONS
from qkv.nn.bilm_encoder import BiLMEncoder
from qkv.nn.char_cnn import find_words
from qkv.nn.memory import Memory
from qkv.objectives.base import Objective, TextContext
from qkv.objectives.chunked_cross_entropy import lm_head, nll
from qkv.objectives.loss import LossSum
from qkv.objectives.samples import decode_token, one_line
from qkv.recipe.objectives import BiLMObjective

_TOP_K = 3  # candidates of each direction in a sample


class Inputs(NamedTuple):
    """Inputs and labels of a bidirectional language model."""

    source: Ragged  # [T]
    positions: Tensor  # [M] states that predict a word, as `BiLMEncoder` numbers them
    labels: Tensor  # [M]
    segments: Segments | None = None  # the streams that the sequences continue, for models with memory

    @property
    def num_targets(self) -> tuple[int, ...]:
        return (len(self.labels),)


def make_inputs(
    chunks: PackedChunks, embedding: spec.CharacterEmbedding, unk_id: int, num_added: tuple[int, int] = (0, 0)
) -> Inputs:
    """Predict each word of a chunk from the words before it, and from those after it.

    Args:
        chunks: the chunks, with special tokens or without.
        embedding: the front end, which knows the words of the vocabulary.
        unk_id: the label of other words.
        num_added: the number of special tokens at the beginning and end of each chunk, which are not predicted.
    """
    source = Ragged.from_lengths(torch.from_numpy(chunks.ids), chunks.lengths.tolist())
    words = find_words(source, embedding)
    layout = words.layout
    from_end = layout.lengths[layout.sequence_ids()] - 1 - layout.positions  # [W]
    is_label = (layout.positions >= num_added[0]) & (from_end >= num_added[1])
    after_another = (is_label & (layout.positions > 0)).nonzero().flatten()
    before_another = (is_label & (from_end > 0)).nonzero().flatten()
    first_ids, is_spelled = source.values[words.first_tokens], words.is_letter[words.first_tokens]
    labels = torch.where(is_spelled, unk_id, first_ids)  # [W]
    positions = torch.cat([NUM_DIRECTIONS * (after_another - 1), NUM_DIRECTIONS * (before_another + 1) + 1])
    return Inputs(source, positions, labels[torch.cat([after_another, before_another])])


class BidirectionalLM(Objective[BiLMObjective]):
    """Bidirectional language modeling. Segments of streams, which continue a memory, get no special tokens."""

    name = "bilm"
    config_class = BiLMObjective
    architectures = frozenset({"encoder"})
    inputs_class = Inputs
    supports_memory = True

    def check_model(self, model: spec.Model) -> None:
        super().check_model(model)
        if not isinstance(model.encoder, spec.BiLM):
            needs = "bilm needs forward and backward layers that are separate (elmo)"
            raise InputError(f"objective: {needs}, and {model.family} is an encoder without them; try mlm")
        if _embedding(model).first_letter_id <= max(model.bos_id, model.eos_id) + 1:
            reason = "the vocabulary of this model has letters only, and bilm predicts words"
            raise InputError(f"objective: {reason}; train one from the beginning (model.family: elmo)")

    def max_chunk_tokens(self, max_length: int, context: TextContext) -> int:
        return max_length if context.carries_memory else max_length - context.template.num_added_tokens

    def prepare(self, batch: ChunkBatch, context: TextContext, rng: CounterRNG) -> Inputs:  # noqa: ARG002  # no noise
        embedding, unk_id = _embedding(context.spec), context.tokenizer.unk_id
        assert unk_id is not None  # `vocabulary_words` refuses other tokenizers
        if context.carries_memory:
            return make_inputs(batch.chunks, embedding, unk_id)._replace(segments=batch.segments)
        before, _, after = context.template.ids
        chunks, _ = apply_template(batch, context.template)
        return make_inputs(chunks, embedding, unk_id, (len(before), len(after)))

    def losses(
        self,
        model: BiLMEncoder,
        inputs: Inputs,
        label_smoothing: float = 0.0,  # noqa: ARG002  # not supported
    ) -> tuple[LossSum, ...]:
        features = model(inputs.source, None, inputs.positions, return_logits=False)  # [M, width]
        return (LossSum(nll(lm_head(model), features, inputs.labels), len(inputs.labels)),)

    def losses_with_memory(
        self,
        model: BiLMEncoder,
        inputs: Inputs,
        memory: Memory,
        label_smoothing: float = 0.0,  # noqa: ARG002  # not supported
    ) -> tuple[tuple[LossSum, ...], Memory]:
        features, memory = model.forward_with_memory(inputs.source, memory, inputs.positions, return_logits=False)
        return (LossSum(nll(lm_head(model), features, inputs.labels), len(inputs.labels)),), memory

    def sample(self, model: BiLMEncoder, chunk: ChunkBatch, context: TextContext, rng: CounterRNG) -> str:  # noqa: ARG002
        """Show the words that each direction predicts in the middle of a text, and the word that is there."""
        tokenizer, (before, _, after) = context.tokenizer, context.template.ids
        ids = torch.tensor([*before, *chunk.chunks.ids.tolist(), *after])
        source = Ragged.from_lengths(ids, [len(ids)]).to(model.device)
        starts = find_words(source, _embedding(context.spec)).first_tokens.tolist()
        middle = len(starts) // 2  # between special tokens, so that there is a word on each side
        positions = torch.tensor([NUM_DIRECTIONS * (middle - 1), NUM_DIRECTIONS * (middle + 1) + 1])
        logits = model.logits(source, positions.to(model.device))  # [2, vocabulary]
        forward, backward = (
            "/".join(decode_token(tokenizer, token_id) for token_id in row)
            for row in logits.topk(_TOP_K).indices.tolist()
        )
        edges = [starts[middle], starts[middle + 1]]
        prefix, word, suffix = (tokenizer.decode(part.tolist()) for part in ids.tensor_split(edges))
        return one_line(f"{prefix} [→ {forward} ← {backward} (was: {word.strip()})] {suffix}")


def _embedding(model: spec.Model) -> spec.CharacterEmbedding:
    embedding = model.source_embedding
    assert isinstance(embedding, spec.CharacterEmbedding)
    return embedding
