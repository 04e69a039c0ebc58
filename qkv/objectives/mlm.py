"""Masked language modelling, alone (Liu et al. 2019) or with next-sentence prediction (Devlin et al. 2019).

The encoder reads a text with masks and says what stood at the tokens that are asked for; nowhere else are there logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv.data.noise.noising import DEFAULT_MLM, MLMConfig, mask_tokens
from qkv.data.rng import Bools, CounterRNG, Ints, PackedChunks
from qkv.nn import Encoder, Ragged
from qkv.objectives.chunked_cross_entropy import lm_head, nll
from qkv.objectives.loss import LossSum
from qkv.tokenization.vocab_tables import VocabTables


class Inputs(NamedTuple):
    """A batch as the encoder takes it, and what it should say."""

    source: Ragged  # [T] with masks
    segments: Tensor | None  # [T] the sentence of a pair that each token belongs to
    positions: Tensor  # [M] the tokens that are asked for
    labels: Tensor  # [M] what stood there
    is_next: Tensor | None  # [B] whether a pair's second sentence came after its first; None: nobody asks

    @property
    def num_targets(self) -> tuple[int, ...]:
        """Of each kind of loss; read off the shapes, so that it never waits for a device."""
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
    """Pieces as the family frames them ([CLS] … [SEP]) with masks; of pairs, their segments and whether one follows."""
    ids, lengths, positions, labels = mask_tokens(chunks, vocab_tables, rng, config)
    segment_ids, is_next_labels = (None if value is None else torch.as_tensor(value) for value in (segments, is_next))
    return Inputs(Ragged.from_lengths(ids, lengths), segment_ids, positions, labels, is_next_labels)


def loss(model: Encoder, batch: Inputs) -> LossSum:
    """Negative log-likelihood of the tokens asked for."""
    features = model(batch.source, batch.segments, batch.positions, return_logits=False)  # [M, width]
    return LossSum(nll(lm_head(model), features, batch.labels), len(batch.labels))


def mlm_and_nsp_losses(model: Encoder, batch: Inputs) -> tuple[LossSum, ...]:
    """Of the tokens asked for and, where somebody asks, of the pairs, from one pass; BERT adds up their two means."""
    if batch.is_next is None:
        return (loss(model, batch),)
    features, nsp_logits = model.forward_with_aux_head(batch.source, batch.segments, batch.positions, return_logits=False)  # [M, width], [B, 2]
    mlm = LossSum(nll(lm_head(model), features, batch.labels), len(batch.labels))
    return mlm, next_sentence_loss(nsp_logits, batch.is_next)


def next_sentence_loss(logits: Tensor, is_next: Tensor) -> LossSum:
    """Binary cross-entropy; of the two logits the first says that the second sentence follows.  # [B, 2], [B]"""
    return LossSum(F.cross_entropy(logits, (~is_next.bool()).to(torch.int64), reduction="sum"), len(is_next))
