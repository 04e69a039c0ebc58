"""Causal language modelling: the next token, given those before it (Radford et al. 2018, 2019)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qkv.data.chance import Pieces
from qkv.nn import Decoder, Ragged
from qkv.objectives.likelihood import head_of, nll
from qkv.objectives.term import Term


class Inputs(NamedTuple):
    """A batch as the decoder takes it, and what it should say."""

    tokens: Ragged  # [T]
    at: Tensor | None  # [M] the tokens behind which one is asked for; None: behind all
    labels: Tensor  # [M]

    @property
    def targets(self) -> tuple[int, ...]:
        return (len(self.labels),)


def prepare(pieces: Pieces, *, start: int | None = None) -> Inputs:
    """Every token of a piece is asked for but the first; behind a start token that one too.

    The last token is not read, for nothing is asked behind it. A piece of one token and no start asks for nothing.
    """
    rows, place = pieces.rows, np.arange(len(pieces.ids)) - np.repeat(pieces.starts, pieces.lengths)
    last = place == pieces.lengths[rows] - 1
    if start is not None and start >= 0:
        tokens = np.where(place == 0, start, np.roll(pieces.ids, 1))
        return _inputs(tokens, pieces.lengths, None, pieces.ids)
    read = ~last | (place == 0)
    lengths = np.maximum(pieces.lengths - 1, 1)
    asked = None if pieces.lengths.min() > 1 else np.flatnonzero(~last[read])
    return _inputs(pieces.ids[read], lengths, asked, pieces.ids[place > 0])


def _inputs(tokens: np.ndarray, lengths: np.ndarray, at: np.ndarray | None, labels: np.ndarray) -> Inputs:
    run = Ragged.of(torch.from_numpy(tokens), lengths.tolist())
    return Inputs(run, None if at is None else torch.from_numpy(at), torch.from_numpy(labels))


def loss(model: Decoder, batch: Inputs) -> Term:
    """Negative log-likelihood of the tokens asked for."""
    rows = model(batch.tokens, batch.at, last=False)  # [M, width]
    return Term(nll(head_of(model), rows, batch.labels), len(batch.labels))
