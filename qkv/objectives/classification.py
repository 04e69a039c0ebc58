"""Losses of tasks: classes, regression, several labels per text, spans, multiple choice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qkv.nn import BatchLayout, Model, Ragged
from qkv.nn.ragged import pad_rows
from qkv.nn.subword_pooling import pool_subwords
from qkv.objectives.loss import IGNORE_INDEX, LayoutChains, LossSum


class Inputs(NamedTuple):
    """Inputs and labels of a model with a task head."""

    source: Ragged  # [T] tokens; images [B, C, H, W], with the layout of their patches
    segments: Tensor | None  # [T] token type ids
    positions: Tensor | None  # [M] tokens to classify; None: all tokens, or whole sequences
    labels: Tensor  # [M] of tokens or sequences; [B, labels] several labels; [B, 2] first and last token of a span
    choices: BatchLayout | None = None  # multiple choice: the sequences of each example
    # word of each token of each sequence, if words are classified by the mean of their tokens; None: a special token
    word_ids: tuple[tuple[int | None, ...], ...] = ()
    # [M or T or B, width] the head's input if the backbone is frozen and was run before
    head_inputs: Tensor | None = None

    @property
    def num_targets(self) -> tuple[int, ...]:
        """Number of targets of the task loss and of the auxiliary language-model loss."""
        return len(self.labels), len(self.source.values) - len(self.source)

    @property
    def layout_chains(self) -> LayoutChains:
        """The layouts of texts with a label or span each, with labels of tokens, or with choices."""
        if self.source.values.dim() > 1 or self.word_ids or self.head_inputs is not None:
            return ()
        if self.choices is not None:
            return ((self.choices, self.source.layout),)
        num_labels = len(self.source) if self.positions is None else len(self.positions)
        return ((self.source.layout,),) if len(self.labels) == num_labels else ()

    def extend(self, chains: LayoutChains) -> Inputs:
        """Add texts without labels; see `qkv.objectives.loss.ExtensibleInputs`.

        If tokens have labels, every token gets a row of logits, and the added rows are ignored.
        """
        ((*outer_layouts, layout),) = chains
        num_tokens = layout.num_tokens
        num_labels = len(chains[0][0]) if self.positions is None else num_tokens
        ignore_value = float("nan") if self.labels.is_floating_point() else IGNORE_INDEX
        return self._replace(
            source=self.source.extend(layout),
            segments=None if self.segments is None else pad_rows(self.segments, num_tokens),
            positions=None if self.positions is None else pad_rows(self.positions, num_labels),
            labels=pad_rows(self.labels, num_labels, ignore_value),
            choices=outer_layouts[0] if outer_layouts else None,
        )


def head_logits(model: Any, batch: Inputs) -> Tensor:
    """Return the head's logits.  # [M or T or B, outputs]"""
    logits = _token_logits(model, batch)
    if not batch.word_ids:
        return logits
    # the head of tokens is linear, so that the mean of the logits equals the logits of the mean
    return pool_subwords(batch.source.with_values(logits), batch.word_ids, "mean").values  # [words, outputs]


def _token_logits(model: Any, batch: Inputs) -> Tensor:
    if batch.head_inputs is not None:
        return model.head(batch.head_inputs)  # type: ignore[no-any-return]  # a module
    logits: Tensor = model.logits(batch.source, batch.positions, batch.segments)
    return logits


def cross_entropy(
    logits: Tensor, batch: Inputs, class_weights: Tensor | None = None, label_smoothing: float = 0.0
) -> LossSum:
    """Return the cross-entropy of classes.

    `class_weights` have mean 1 over the training set. They are not normalized per batch, which would make the gradient
    depend on how a batch is split into micro-batches.
    """
    total = F.cross_entropy(
        logits.float(), batch.labels, class_weights, reduction="sum", label_smoothing=label_smoothing
    )
    return LossSum(total, len(batch.labels))


def mse(logits: Tensor, batch: Inputs) -> LossSum:
    """Return the squared error of a head with one output; labels that are NaN are ignored."""
    labels = batch.labels.float()
    error = torch.where(labels.isnan(), 0.0, logits[:, 0].float() - labels)
    return LossSum(error.square().sum(), len(labels))


def multi_label_bce(logits: Tensor, batch: Inputs) -> LossSum:
    """Return the binary cross-entropy of each label, averaged over labels; labels that are NaN are ignored."""
    labels = batch.labels.float()
    mask, gold = (~labels.isnan()).float(), labels.nan_to_num()
    total = F.binary_cross_entropy_with_logits(logits.float(), gold, mask, reduction="sum")
    return LossSum(total / logits.shape[1], len(labels))


def span_cross_entropy(logits: Tensor, batch: Inputs) -> LossSum:
    """Return the cross-entropy of the first and the last token of a span (Devlin et al. 2019, section 4.2)."""
    padded = batch.source.with_values(logits.float()).to_padded(float("-inf"))  # [B, longest, 2]
    start_loss, end_loss = (
        F.cross_entropy(padded[..., side], batch.labels[:, side], reduction="sum") for side in (0, 1)
    )
    return LossSum((start_loss + end_loss) / 2, len(batch.labels))


def multiple_choice_ce(logits: Tensor, batch: Inputs) -> LossSum:
    """Return the cross-entropy of the correct choice among the sequences of each example."""
    assert batch.choices is not None
    scores = Ragged(logits[:, 0].float(), batch.choices).to_padded(float("-inf"))  # [examples, most]
    return LossSum(F.cross_entropy(scores, batch.labels, reduction="sum"), len(batch.labels))


def auxiliary_lm_loss(model: Model, batch: Inputs, hidden: Tensor) -> LossSum:
    """Return the loss of the next token, with the embedding matrix as output (Radford et al. 2018, section 3.2)."""
    tokens = batch.source.values
    has_next = torch.ones_like(tokens, dtype=torch.bool)
    has_next[batch.source.layout.cu_seqlens[1:].long() - 1] = False  # the last token of a text has no next one
    output_weight = model.front_end.token_weight
    assert output_weight is not None  # a language model reads tokens
    logits = F.linear(hidden[has_next], output_weight).float()  # [T - B, vocabulary]
    next_tokens = tokens.roll(-1)[has_next]
    return LossSum(F.cross_entropy(logits, next_tokens, reduction="sum"), len(tokens) - len(batch.source))


def pack_sequences(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
    """Concatenate sequences; return the tokens and the lengths."""
    lengths = [len(sequence) for sequence in sequences]
    # ten times faster than torch.tensor(list), during which other threads cannot launch kernels
    flat = np.fromiter(chain.from_iterable(sequences), np.int64, sum(lengths))
    return torch.from_numpy(flat), lengths
