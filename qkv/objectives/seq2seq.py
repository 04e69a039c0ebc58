"""Conditional language modeling: predict each target token from the source and the target tokens before it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv.data.batching import PairBatch
from qkv.nn import BatchLayout, Model, Ragged
from qkv.objectives.chunked_cross_entropy import lm_head, nll


class Inputs(NamedTuple):
    """Inputs and labels of an encoder-decoder."""

    source: Ragged  # [Ts] each sequence ends with EOS
    target: Ragged  # [Tt] each sequence starts with BOS
    labels: Tensor  # [Tt] the target shifted by one token: each sequence ends with EOS

    @property
    def num_targets(self) -> tuple[int, ...]:
        return (len(self.labels),)


def make_inputs(batch: PairBatch, *, bos_id: int, eos_id: int) -> Inputs:
    """Add BOS and EOS tokens to a packed batch, on the host."""
    source = _insert_token(batch.source, batch.source_lengths, eos_id, at_start=False)
    target = _insert_token(batch.target, batch.target_lengths, bos_id, at_start=True)
    labels = _insert_token(batch.target, batch.target_lengths, eos_id, at_start=False)
    lengths = (batch.source_lengths + 1).tolist(), (batch.target_lengths + 1).tolist()
    return Inputs(Ragged.from_lengths(source, lengths[0]), Ragged.from_lengths(target, lengths[1]), labels)


def _insert_token(ids: Tensor, lengths: Tensor, token: int, *, at_start: bool) -> Tensor:
    """Add a token at the start or the end of each packed sequence.  # [T], [B] -> [T + B]"""
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    out = ids.new_full((len(ids) + len(lengths),), token)
    out[torch.arange(len(ids)) + rows + (1 if at_start else 0)] = ids
    return out


def loss(
    model: Model,
    batch: Inputs,
    *,
    label_smoothing: float = 0.0,
    scheduled_sampling: float = 0.0,
    rdrop_alpha: float = 0.0,
) -> Tensor:
    """Return the cross-entropy summed over targets.

    Args:
        model: the model.
        batch: its inputs and labels.
        label_smoothing: fraction of each label that is distributed over the vocabulary (Szegedy et al. 2016).
        scheduled_sampling: probability that a recurrent decoder reads its own output instead of the target token
            (Bengio et al. 2015).
        rdrop_alpha: weight of the divergence between two passes with different dropout (R-Drop, Liang et al. 2021).
    """
    if not rdrop_alpha:
        features = model(batch.source, batch.target, scheduled_sampling, return_logits=False)  # [T, width]
        return nll(lm_head(model), features, batch.labels, label_smoothing)
    source, target, labels = _repeat_batch(batch)
    logits = model(source, target, scheduled_sampling)  # [2 T, vocabulary]
    total = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
    log_p, log_q = torch.log_softmax(logits.float(), -1).chunk(2)  # [T, vocabulary] each
    symmetric_kl = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum()  # KL(p, q) + KL(q, p)
    return total / 2 + rdrop_alpha / 2 * symmetric_kl / 2


def _repeat_batch(batch: Inputs) -> Inputs:
    """Concatenate a batch with itself, so that one pass draws different dropout for both halves."""
    return Inputs(_repeat(batch.source), _repeat(batch.target), batch.labels.repeat(2))


def _repeat(x: Ragged) -> Ragged:
    return Ragged(x.values.repeat(2), BatchLayout(x.layout.lengths_list * 2, x.layout.device))
