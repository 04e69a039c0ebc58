"""Masked language modelling, alone (Liu et al. 2019) or with next-sentence prediction (Devlin et al. 2019).

The encoder reads a text with masks and says what stood at the tokens that are asked for; nowhere else are there logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv.data.chance import Bools, Chance, Ints, Pieces
from qkv.data.corruption import MASKING, Masking, mask
from qkv.nn import Encoder, Ragged
from qkv.objectives.likelihood import head_of, nll
from qkv.objectives.term import Term
from qkv.text.marks import Marks


class Inputs(NamedTuple):
    """A batch as the encoder takes it, and what it should say."""

    source: Ragged  # [T] with masks
    segments: Tensor | None  # [T] the sentence of a pair that each token belongs to
    at: Tensor  # [M] the tokens that are asked for
    labels: Tensor  # [M] what stood there
    follows: Tensor | None  # [B] whether a pair's second sentence came after its first; None: nobody asks

    @property
    def targets(self) -> tuple[int, ...]:
        """Of each kind of loss; read off the shapes, so that it never waits for a device."""
        return (len(self.at),) if self.follows is None else (len(self.at), len(self.follows))


def prepare(
    pieces: Pieces,
    marks: Marks,
    chance: Chance,
    how: Masking = MASKING,
    *,
    segments: Tensor | Ints | None = None,
    follows: Tensor | Bools | None = None,
) -> Inputs:
    """Pieces as the family frames them ([CLS] … [SEP]) with masks; of pairs, their segments and whether one follows."""
    ids, lengths, at, labels = mask(pieces, marks, chance, how)
    kinds, verdicts = (None if given is None else torch.as_tensor(given) for given in (segments, follows))
    return Inputs(Ragged.of(ids, lengths), kinds, at, labels, verdicts)


def loss(model: Encoder, batch: Inputs) -> Term:
    """Negative log-likelihood of the tokens asked for."""
    rows = model(batch.source, batch.segments, batch.at, last=False)  # [M, width]
    return Term(nll(head_of(model), rows, batch.labels), len(batch.labels))


def losses(model: Encoder, batch: Inputs) -> tuple[Term, ...]:
    """Of the tokens asked for and, where somebody asks, of the pairs, from one pass; BERT adds up their two means."""
    if batch.follows is None:
        return (loss(model, batch),)
    rows, judged = model.both(batch.source, batch.segments, batch.at, last=False)  # [M, width], [B, 2]
    words = Term(nll(head_of(model), rows, batch.labels), len(batch.labels))
    return words, next_sentence(judged, batch.follows)


def next_sentence(logits: Tensor, follows: Tensor) -> Term:
    """Binary cross-entropy; of the two logits the first says that the second sentence follows.  # [B, 2], [B]"""
    return Term(F.cross_entropy(logits, (~follows.bool()).to(torch.int64), reduction="sum"), len(follows))
