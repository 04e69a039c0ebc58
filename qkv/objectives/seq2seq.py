"""Conditional language modeling: predict each target token from the source and the target tokens before it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qkv.data.batching import PairBatch
from qkv.nn import Model, Ragged
from qkv.nn.ragged import pad_rows
from qkv.objectives.chunked_cross_entropy import lm_head, nll, rdrop_nll
from qkv.objectives.loss import IGNORE_INDEX, LayoutChains


class Inputs(NamedTuple):
    """Inputs and labels of an encoder-decoder."""

    source: Ragged  # [Ts] each sequence ends with EOS
    target: Ragged  # [Tt] each sequence starts with BOS
    labels: Tensor  # [Tt] the target shifted by one token: each sequence ends with EOS

    @property
    def num_targets(self) -> tuple[int, ...]:
        return (len(self.labels),)

    @property
    def layout_chains(self) -> LayoutChains:
        return (self.source.layout,), (self.target.layout,)

    def extend(self, chains: LayoutChains) -> Inputs:
        """Add pairs without labels; see `qkv.objectives.loss.ExtensibleInputs`."""
        (source_layout,), (target_layout,) = chains
        labels = pad_rows(self.labels, target_layout.num_tokens, IGNORE_INDEX)
        return self._replace(
            source=self.source.extend(source_layout), target=self.target.extend(target_layout), labels=labels
        )


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
        batch: its inputs and labels; targets with the label `IGNORE_INDEX` do not count.
        label_smoothing: fraction of each label that is distributed over the vocabulary (Szegedy et al. 2016).
        scheduled_sampling: probability that a recurrent decoder reads its own output instead of the target token
            (Bengio et al. 2015).
        rdrop_alpha: weight of the divergence between two passes with different dropout (R-Drop, Liang et al. 2021).
    """
    if not rdrop_alpha:
        features = model(batch.source, batch.target, scheduled_sampling, return_logits=False)  # [T, width]
        return nll(lm_head(model), features, batch.labels, label_smoothing)
    # concatenated with itself, so that one pass draws different dropout for both halves
    source, target = batch.source.repeat(2), batch.target.repeat(2)
    features = model(source, target, scheduled_sampling, return_logits=False)  # [2 T, width]
    return rdrop_nll(lm_head(model), features, batch.labels, label_smoothing, rdrop_alpha)
