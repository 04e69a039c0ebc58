"""Masked language modeling, alone (Liu et al. 2019) or with next-sentence prediction (Devlin et al. 2019).

Logits are computed for the tokens to predict only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv import spec
from qkv.data.corpora.chunks import ChunkBatch
from qkv.data.noise.config import DEFAULT_MLM, MLMConfig
from qkv.data.noise.mlm import mask_tokens
from qkv.data.rng import Bools, CounterRNG, Ints, PackedChunks
from qkv.data.template_batch import TemplateIds, apply_template
from qkv.nn import Encoder, Ragged
from qkv.objectives.base import Objective, TextContext
from qkv.objectives.chunked_cross_entropy import lm_head, nll
from qkv.objectives.loss import LossSum
from qkv.objectives.samples import fill_mask_sample
from qkv.recipe.objectives import MLMObjective
from qkv.tokenization.vocab_tables import VocabTables


class Inputs(NamedTuple):
    """Inputs and labels of an encoder."""

    source: Ragged  # [T] with mask tokens
    segments: Tensor | None  # [T] token type ids of pairs
    positions: Tensor  # [M] the tokens to predict
    labels: Tensor  # [M] their original ids
    is_next: Tensor | None  # [B] whether the second segment follows the first; None: no next-sentence prediction

    @property
    def num_targets(self) -> tuple[int, ...]:
        """Number of targets of each loss, from the shapes alone, so that it needs no device synchronization."""
        return (len(self.positions),) if self.is_next is None else (len(self.positions), len(self.is_next))


def make_inputs(
    chunks: PackedChunks,
    vocab_tables: VocabTables,
    rng: CounterRNG,
    config: MLMConfig = DEFAULT_MLM,
    *,
    segments: Tensor | Ints | None = None,
    is_next: Tensor | Bools | None = None,
) -> Inputs:
    """Mask chunks that have the tokenizer's special tokens ([CLS] … [SEP]) already.

    Args:
        chunks: the chunks, or pairs of segments.
        vocab_tables: the special tokens and word boundaries of the vocabulary.
        rng: source of the random decisions.
        config: how many tokens are predicted, and how they are replaced.
        segments: token type ids of pairs.
        is_next: whether the second segment of each pair follows the first.
    """
    ids, lengths, positions, labels = mask_tokens(chunks, vocab_tables, rng, config)
    segment_ids, is_next_labels = (None if value is None else torch.as_tensor(value) for value in (segments, is_next))
    return Inputs(Ragged.from_lengths(ids, lengths), segment_ids, positions, labels, is_next_labels)


def loss(model: Encoder, batch: Inputs) -> LossSum:
    """Return the negative log-likelihood of the tokens to predict."""
    features = model(batch.source, batch.segments, batch.positions, return_logits=False)  # [M, width]
    return LossSum(nll(lm_head(model), features, batch.labels), len(batch.labels))


def mlm_and_nsp_losses(model: Encoder, batch: Inputs) -> tuple[LossSum, ...]:
    """Return the masked-token loss and, for pairs, the next-sentence loss from one forward pass."""
    if batch.is_next is None:
        return (loss(model, batch),)
    # [M, width], [B, 2]
    features, nsp_logits = model.forward_with_aux_head(
        batch.source, batch.segments, batch.positions, return_logits=False
    )
    mlm = LossSum(nll(lm_head(model), features, batch.labels), len(batch.labels))
    return mlm, next_sentence_loss(nsp_logits, batch.is_next)


def next_sentence_loss(logits: Tensor, is_next: Tensor) -> LossSum:
    """Return the cross-entropy of next-sentence prediction; class 0 means "is next".  # [B, 2], [B]"""
    return LossSum(F.cross_entropy(logits, (~is_next.bool()).to(torch.int64), reduction="sum"), len(is_next))


class MaskedLM(Objective[MLMObjective]):
    """Masked language modeling with optional next-sentence prediction."""

    name = "mlm"
    config_class = MLMObjective
    architectures = frozenset({"encoder"})
    inputs_class = Inputs

    @property
    def loss_names(self) -> tuple[str, ...]:
        return ("loss", "next_sentence_loss") if self.config.next_sentence else ("loss",)

    @property
    def sentence_pairs(self) -> bool:
        return self.config.next_sentence

    def max_chunk_tokens(self, max_length: int, context: TextContext) -> int:
        return max_length - self._template(context).num_added_tokens

    def prepare(self, batch: ChunkBatch, context: TextContext, rng: CounterRNG) -> Inputs:
        chunks, token_type_ids = apply_template(batch, self._template(context))
        embedding = context.spec.source_embedding
        has_segments = isinstance(embedding, spec.Embedding) and embedding.num_segments and self.config.next_sentence
        segments = token_type_ids if has_segments else None
        return make_inputs(chunks, context.vocab_tables, rng, self.config, segments=segments, is_next=batch.is_next)

    def losses(
        self,
        model: Encoder,
        inputs: Inputs,
        label_smoothing: float = 0.0,  # noqa: ARG002  # not supported
    ) -> tuple[LossSum, ...]:
        return mlm_and_nsp_losses(model, inputs)

    def sample(self, model: Encoder, chunk: ChunkBatch, context: TextContext, rng: CounterRNG) -> str:  # noqa: ARG002
        return fill_mask_sample(model, context.tokenizer, context.template, chunk.chunks.ids.tolist())

    def _template(self, context: TextContext) -> TemplateIds:
        return context.pair_template if self.config.next_sentence else context.template
