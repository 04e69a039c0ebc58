"""Conditional language modelling: the next target token, given the source and the tokens before it.

The loss is a sum over targets; whoever steps the optimiser divides once by their number, so that cutting a batch into
parts changes no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv.data.batches import Batch
from qkv.nn import EncoderDecoder, Layout, Ragged
from qkv.objectives.likelihood import head_of, nll


class Inputs(NamedTuple):
    """A batch as the model takes it, and what it should say."""

    source: Ragged  # [Ts] each sequence closed by the end token
    target: Ragged  # [Tt] each sequence opened by the start token
    labels: Tensor  # [Tt] the same shifted by one: each sequence closed by the end token

    @property
    def targets(self) -> tuple[int, ...]:
        return (len(self.labels),)


def inputs(batch: Batch, *, start: int, end: int) -> Inputs:
    """Adds the start and end tokens to a packed batch, on the host; `term.to_device` takes it further."""
    source = _with(batch.source, batch.source_lengths, end, first=False)
    target = _with(batch.target, batch.target_lengths, start, first=True)
    labels = _with(batch.target, batch.target_lengths, end, first=False)
    lengths = (batch.source_lengths + 1).tolist(), (batch.target_lengths + 1).tolist()
    return Inputs(Ragged.of(source, lengths[0]), Ragged.of(target, lengths[1]), labels)


def _with(ids: Tensor, lengths: Tensor, token: int, *, first: bool) -> Tensor:
    """One more token at the beginning or the end of each packed sequence.  # [T], [B] -> [T + B]"""
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    out = ids.new_full((len(ids) + len(lengths),), token)
    out[torch.arange(len(ids)) + rows + (1 if first else 0)] = ids
    return out


def loss(
    model: EncoderDecoder, batch: Inputs, *, smoothing: float = 0.0, own: float = 0.0, agree: float = 0.0
) -> Tensor:
    """Cross-entropy summed over targets, with label smoothing (Szegedy et al. 2016).

    `own`: how often a recurrent decoder is fed its own output instead of the teacher's (Bengio et al. 2015).
    `agree`: weight of how far two passes with different dropout differ (R-Drop, Liang et al. 2021; half of its alpha).
    """
    if not agree:
        rows = model(batch.source, batch.target, own, last=False)  # [T, width]
        return nll(head_of(model), rows, batch.labels, smoothing)
    source, target, labels = _twice(batch)
    logits = model(source, target, own)  # [2 T, vocabulary]
    total = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    one, other = torch.log_softmax(logits.float(), -1).chunk(2)  # [T, vocabulary] each
    apart = ((one.exp() - other.exp()) * (one - other)).sum()  # KL(one, other) + KL(other, one)
    return total / 2 + agree * apart / 2


def _twice(batch: Inputs) -> Inputs:
    """The batch after itself: one pass over it draws dropout for both halves."""
    return Inputs(
        *(Ragged(x.values.repeat(2), Layout(x.layout.sizes * 2, x.layout.device)) for x in batch[:2]),
        batch.labels.repeat(2),
    )
