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
from qkv.nn.words import by_word
from qkv.objectives.term import Term


class Inputs(NamedTuple):
    """A batch as the model takes it, and what it should say."""

    source: Ragged  # [T]; pictures [B, C, H, W], in the layout of the tokens that they become
    segments: Tensor | None  # [T]
    at: Tensor | None  # [M] the tokens that are judged; None: all, or whole sequences
    labels: Tensor  # [M] of tokens or sequences; [B, labels] several at once; [B, 2] first and last token of a span
    choices: tuple[int, ...] = ()  # sequences of each example, where one of several is right
    # the word of each token of each sequence, where the mean of its tokens is judged; a token of none is not judged
    words: tuple[tuple[int | None, ...], ...] = ()

    @property
    def targets(self) -> tuple[int, ...]:
        """Of the task, and of the language model beside it, where there is one."""
        return len(self.labels), len(self.source.values) - len(self.source)


def judged(model: Any, batch: Inputs) -> Tensor:
    """The head's logits, whatever the body.  # [M or T or B, outputs]"""
    logits = _of_tokens(model, batch)
    if not batch.words:
        return logits
    # a token's head is linear, so that the mean of logits is what the mean of vectors gets
    return by_word(batch.source.like(logits), batch.words, "mean").values  # [words, outputs]


def _of_tokens(model: Any, batch: Inputs) -> Tensor:
    if isinstance(model, Encoder):
        return model(batch.source, batch.segments, batch.at)
    if isinstance(model, Decoder):
        return model(batch.source, batch.at)
    logits = model(batch.source, batch.source.shifted(model.spec.start))
    return logits if batch.at is None else logits[batch.at]


def classes(logits: Tensor, batch: Inputs, weights: Tensor | None = None, smoothing: float = 0.0) -> Term:
    """Cross-entropy. Class weights are as they are given, one on the average over the training set: divided by a
    batch's own they would make the gradient depend on how a batch is cut."""
    total = F.cross_entropy(logits.float(), batch.labels, weights, reduction="sum", label_smoothing=smoothing)
    return Term(total, len(batch.labels))


def numbers(logits: Tensor, batch: Inputs) -> Term:
    """Squared error of a head with one output; a label that is not a number asks for none."""
    labels = batch.labels.float()
    error = torch.where(labels.isnan(), 0.0, logits[:, 0].float() - labels)
    return Term(error.square().sum(), len(labels))


def several(logits: Tensor, batch: Inputs) -> Term:
    """Binary cross-entropy of each label for itself, the mean over labels; what is not a number asks for none."""
    labels = batch.labels.float()
    asked, right = (~labels.isnan()).float(), labels.nan_to_num()
    found = F.binary_cross_entropy_with_logits(logits.float(), right, asked, reduction="sum")
    return Term(found / logits.shape[1], len(labels))


def spans(logits: Tensor, batch: Inputs) -> Term:
    """Where an answer begins and where it ends, each a choice among a sequence's tokens (Devlin et al. 2019, 4.2)."""
    padded = batch.source.like(logits.float()).to_padded(float("-inf"))  # [B, longest, 2]
    begins, ends = (F.cross_entropy(padded[..., side], batch.labels[:, side], reduction="sum") for side in (0, 1))
    return Term((begins + ends) / 2, len(batch.labels))


def choices(logits: Tensor, batch: Inputs) -> Term:
    """One score a sequence; the right one among those of its example."""
    scores = Ragged.of(logits[:, 0].float(), batch.choices).to_padded(float("-inf"))  # [examples, most]
    return Term(F.cross_entropy(scores, batch.labels, reduction="sum"), len(batch.labels))


def language(model: Decoder, batch: Inputs, hidden: Tensor) -> Term:
    """Beside a task, the next token of its texts, by the embedding's own matrix (Radford et al. 2018, 3.2)."""
    tokens = batch.source.values
    asked = torch.ones_like(tokens, dtype=torch.bool)
    asked[batch.source.layout.offsets[1:].long() - 1] = False  # behind a text's last token there is none
    logits = F.linear(hidden[asked], model.target.tokens.weight).float()  # [T - B, vocabulary]
    right = tokens.roll(-1)[asked]
    return Term(F.cross_entropy(logits, right, reduction="sum"), len(tokens) - len(batch.source))


def packed(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
    """Sequences end to end, and their lengths."""
    lengths = [len(sequence) for sequence in sequences]
    # a tenth of the time of a tensor of a list: while it is made, other threads cannot launch kernels
    joined = np.fromiter(chain.from_iterable(sequences), np.int64, sum(lengths))
    return torch.from_numpy(joined), lengths
