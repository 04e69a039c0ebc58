"""Conditional language modelling: the next target token, given the source and the tokens before it.

The loss is a sum over targets; whoever steps the optimiser divides once by their number, so that cutting a batch into
parts changes no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv.data.batching import PairBatch
from qkv.nn import BatchLayout, EncoderDecoder, Ragged
from qkv.objectives.chunked_cross_entropy import lm_head, nll


class Inputs(NamedTuple):
    """A batch as the model takes it, and what it should say."""

    source: Ragged  # [Ts] each sequence closed by the end token
    target: Ragged  # [Tt] each sequence opened by the start token
    labels: Tensor  # [Tt] the same shifted by one: each sequence closed by the end token

    @property
    def num_targets(self) -> tuple[int, ...]:
        return (len(self.labels),)


def make_inputs(batch: PairBatch, *, bos_id: int, eos_id: int) -> Inputs:
    """Adds the start and end tokens to a packed batch, on the host; `loss.to_device` takes it further."""
    source = _insert_token(batch.source, batch.source_lengths, eos_id, at_start=False)
    target = _insert_token(batch.target, batch.target_lengths, bos_id, at_start=True)
    labels = _insert_token(batch.target, batch.target_lengths, eos_id, at_start=False)
    lengths = (batch.source_lengths + 1).tolist(), (batch.target_lengths + 1).tolist()
    return Inputs(Ragged.from_lengths(source, lengths[0]), Ragged.from_lengths(target, lengths[1]), labels)


def _insert_token(ids: Tensor, lengths: Tensor, token: int, *, at_start: bool) -> Tensor:
    """One more token at the beginning or the end of each packed sequence.  # [T], [B] -> [T + B]"""
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    out = ids.new_full((len(ids) + len(lengths),), token)
    out[torch.arange(len(ids)) + rows + (1 if at_start else 0)] = ids
    return out


def loss(
    model: EncoderDecoder, batch: Inputs, *, label_smoothing: float = 0.0, scheduled_sampling: float = 0.0, rdrop_alpha: float = 0.0
) -> Tensor:
    """Cross-entropy summed over targets, with label smoothing (Szegedy et al. 2016).

    `scheduled_sampling`: how often a recurrent decoder is fed its own output instead of the teacher's (Bengio et al. 2015).
    `rdrop_alpha`: weight of how far two passes with different dropout differ (the alpha of R-Drop, Liang et al. 2021).
    """
    if not rdrop_alpha:
        features = model(batch.source, batch.target, scheduled_sampling, return_logits=False)  # [T, width]
        return nll(lm_head(model), features, batch.labels, label_smoothing)
    source, target, labels = _repeat_batch(batch)
    logits = model(source, target, scheduled_sampling)  # [2 T, vocabulary]
    total = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
    log_p, log_q = torch.log_softmax(logits.float(), -1).chunk(2)  # [T, vocabulary] each
    symmetric_kl = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum()  # KL(one, other) + KL(other, one)
    return total / 2 + rdrop_alpha / 2 * symmetric_kl / 2


def _repeat_batch(batch: Inputs) -> Inputs:
    """The batch after itself: one pass over it draws dropout for both halves."""
    return Inputs(
        *(Ragged(x.values.repeat(2), BatchLayout(x.layout.lengths_list * 2, x.layout.device)) for x in batch[:2]),
        batch.labels.repeat(2),
    )
