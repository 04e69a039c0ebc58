"""What a head that labels is asked, and how wrong it is: classes, numbers, several classes at once, spans, choices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qkv.nn import Decoder, Encoder, Ragged
from qkv.nn.subword_pooling import pool_subwords
from qkv.objectives.loss import LossSum


class Inputs(NamedTuple):
    """A batch as the model takes it, and what it should say."""

    source: Ragged  # [T]; pictures [B, C, H, W], in the layout of the tokens that they become
    segments: Tensor | None  # [T]
    positions: Tensor | None  # [M] the tokens that are judged; None: all, or whole sequences
    labels: Tensor  # [M] of tokens or sequences; [B, labels] several at once; [B, 2] first and last token of a span
    num_choices: tuple[int, ...] = ()  # sequences of each example, where one of several is right
    # the word of each token of each sequence, where the mean of its tokens is judged; a token of none is not judged
    word_ids: tuple[tuple[int | None, ...], ...] = ()

    @property
    def num_targets(self) -> tuple[int, ...]:
        """Of the task, and of the language model beside it, where there is one."""
        return len(self.labels), len(self.source.values) - len(self.source)


def head_logits(model: Any, batch: Inputs) -> Tensor:
    """The head's logits, whatever the body.  # [M or T or B, outputs]"""
    logits = _token_logits(model, batch)
    if not batch.word_ids:
        return logits
    # a token's head is linear, so that the mean of logits is what the mean of vectors gets
    return pool_subwords(batch.source.with_values(logits), batch.word_ids, "mean").values  # [words, outputs]


def _token_logits(model: Any, batch: Inputs) -> Tensor:
    if isinstance(model, Encoder):
        return model(batch.source, batch.segments, batch.positions)
    if isinstance(model, Decoder):
        return model(batch.source, batch.positions)
    logits = model(batch.source, batch.source.shift_right(model.spec.bos_id))
    return logits if batch.positions is None else logits[batch.positions]


def cross_entropy(logits: Tensor, batch: Inputs, class_weights: Tensor | None = None, label_smoothing: float = 0.0) -> LossSum:
    """Cross-entropy. Class weights are as they are given, one on the average over the training set: divided by a
    batch's own they would make the gradient depend on how a batch is cut."""
    total = F.cross_entropy(logits.float(), batch.labels, class_weights, reduction="sum", label_smoothing=label_smoothing)
    return LossSum(total, len(batch.labels))


def mse(logits: Tensor, batch: Inputs) -> LossSum:
    """Squared error of a head with one output; a label that is not a number asks for none."""
    labels = batch.labels.float()
    error = torch.where(labels.isnan(), 0.0, logits[:, 0].float() - labels)
    return LossSum(error.square().sum(), len(labels))


def multi_label_bce(logits: Tensor, batch: Inputs) -> LossSum:
    """Binary cross-entropy of each label for itself, the mean over labels; what is not a number asks for none."""
    labels = batch.labels.float()
    mask, gold = (~labels.isnan()).float(), labels.nan_to_num()
    total = F.binary_cross_entropy_with_logits(logits.float(), gold, mask, reduction="sum")
    return LossSum(total / logits.shape[1], len(labels))


def span_cross_entropy(logits: Tensor, batch: Inputs) -> LossSum:
    """Where an answer begins and where it ends, each a choice among a sequence's tokens (Devlin et al. 2019, 4.2)."""
    padded = batch.source.with_values(logits.float()).to_padded(float("-inf"))  # [B, longest, 2]
    start_loss, end_loss = (F.cross_entropy(padded[..., side], batch.labels[:, side], reduction="sum") for side in (0, 1))
    return LossSum((start_loss + end_loss) / 2, len(batch.labels))


def multiple_choice_ce(logits: Tensor, batch: Inputs) -> LossSum:
    """One score a sequence; the right one among those of its example."""
    scores = Ragged.from_lengths(logits[:, 0].float(), batch.num_choices).to_padded(float("-inf"))  # [examples, most]
    return LossSum(F.cross_entropy(scores, batch.labels, reduction="sum"), len(batch.labels))


def auxiliary_lm_loss(model: Decoder, batch: Inputs, hidden: Tensor) -> LossSum:
    """Beside a task, the next token of its texts, by the embedding's own matrix (Radford et al. 2018, 3.2)."""
    tokens = batch.source.values
    has_next = torch.ones_like(tokens, dtype=torch.bool)
    has_next[batch.source.layout.cu_seqlens[1:].long() - 1] = False  # behind a text's last token there is none
    logits = F.linear(hidden[has_next], model.target_embedding.tokens.weight).float()  # [T - B, vocabulary]
    next_tokens = tokens.roll(-1)[has_next]
    return LossSum(F.cross_entropy(logits, next_tokens, reduction="sum"), len(tokens) - len(batch.source))


def pack_sequences(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
    """Sequences end to end, and their lengths."""
    lengths = [len(sequence) for sequence in sequences]
    # a tenth of the time of a tensor of a list: while it is made, other threads cannot launch kernels
    flat = np.fromiter(chain.from_iterable(sequences), np.int64, sum(lengths))
    return torch.from_numpy(flat), lengths
