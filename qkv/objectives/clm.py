"""Causal language modelling: the next token, given those before it (Radford et al. 2018, 2019)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qkv.data.rng import PackedChunks
from qkv.nn import Decoder, Ragged
from qkv.objectives.chunked_cross_entropy import lm_head, nll
from qkv.objectives.loss import LossSum


class Inputs(NamedTuple):
    """A batch as the decoder takes it, and what it should say."""

    tokens: Ragged  # [T]
    positions: Tensor | None  # [M] the tokens behind which one is asked for; None: behind all
    labels: Tensor  # [M]

    @property
    def num_targets(self) -> tuple[int, ...]:
        return (len(self.labels),)


def make_inputs(chunks: PackedChunks, *, bos_id: int | None = None) -> Inputs:
    """Every token of a piece is asked for but the first; behind a start token that one too.

    The last token is not read, for nothing is asked behind it. A piece of one token and no start asks for nothing.
    """
    chunk_ids, token_positions = chunks.row_ids, np.arange(len(chunks.ids)) - np.repeat(chunks.starts, chunks.lengths)
    is_last = token_positions == chunks.lengths[chunk_ids] - 1
    if bos_id is not None and bos_id >= 0:
        tokens = np.where(token_positions == 0, bos_id, np.roll(chunks.ids, 1))
        return _pack_inputs(tokens, chunks.lengths, None, chunks.ids)
    is_input = ~is_last | (token_positions == 0)
    lengths = np.maximum(chunks.lengths - 1, 1)
    label_positions = None if chunks.lengths.min() > 1 else np.flatnonzero(~is_last[is_input])
    return _pack_inputs(chunks.ids[is_input], lengths, label_positions, chunks.ids[token_positions > 0])


def _pack_inputs(tokens: np.ndarray, lengths: np.ndarray, positions: np.ndarray | None, labels: np.ndarray) -> Inputs:
    packed = Ragged.from_lengths(torch.from_numpy(tokens), lengths.tolist())
    return Inputs(packed, None if positions is None else torch.from_numpy(positions), torch.from_numpy(labels))


def loss(model: Decoder, batch: Inputs) -> LossSum:
    """Negative log-likelihood of the tokens asked for."""
    features = model(batch.tokens, batch.positions, return_logits=False)  # [M, width]
    return LossSum(nll(lm_head(model), features, batch.labels), len(batch.labels))
