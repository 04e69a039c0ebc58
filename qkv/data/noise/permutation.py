"""Orders of factorization for permutation language modeling (Yang et al. 2019, 2.2 and 2.3)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qkv.data.noise.config import DEFAULT_PLM, PLMConfig
from qkv.data.rng import Bools, CounterRNG, Ints, PackedChunks, cumsum_within_rows, uniform
from qkv.tokenization.vocab_tables import VocabTables


class Factorization(NamedTuple):
    """An order in which the tokens of each chunk are predicted."""

    order: Ints  # [T] rank of each token: 0 for tokens that are given, then 1, 2, … for those to predict
    targets: Ints  # [M] indices of the tokens to predict, increasing
    target_counts: Ints  # [B] number of them in each chunk, at least 1


def sample_factorization(
    chunks: PackedChunks, vocab: VocabTables, rng: CounterRNG, config: PLMConfig = DEFAULT_PLM
) -> Factorization:
    """Select spans to predict in each chunk, and draw the order of their tokens.

    The text is divided into windows of K L tokens, where L is drawn from 1 to `max_span_length`, and each window has a
    span of L tokens at a random place. All other tokens come first in the order, as in the paper: tokens with little
    context are hard to predict and slow down the training. Special tokens are never predicted. Every chunk has a token
    to predict: a random one if its only window is longer than the chunk and the span lies behind its end.
    """
    vocab.check_ids(chunks.ids)
    rows, is_text = chunks.row_ids, ~vocab.is_special[chunks.ids]
    is_text |= ~np.logical_or.reduceat(is_text, chunks.starts)[rows]  # a chunk of special tokens only
    text_rows = rows[is_text]
    text_lengths = np.bincount(text_rows, minlength=len(chunks.lengths))  # [B]
    is_target = is_text.copy()
    is_target[is_text] = _sample_spans(text_lengths, chunks.indices, rng, config)
    # one row of random numbers per token: the order of the targets, and the choice of a token for chunks without any
    keys = rng.random_bits(chunks.indices, chunks.lengths, "order")  # [T]
    has_target = np.logical_or.reduceat(is_target, chunks.starts)  # [B]
    candidates = np.flatnonzero(is_text & ~has_target[rows])
    if len(candidates):
        by_key = candidates[np.lexsort((keys[candidates], rows[candidates]))]
        is_target[by_key[np.diff(rows[by_key], prepend=-1) != 0]] = True
    targets = np.flatnonzero(is_target)
    by_key = targets[np.lexsort((keys[targets], rows[targets]))]
    order = np.zeros(len(chunks.ids), dtype=np.int64)
    order[by_key] = 1 + cumsum_within_rows(np.ones_like(by_key), rows[by_key])
    return Factorization(order, targets, np.bincount(rows[targets], minlength=len(chunks.lengths)))


def _sample_spans(lengths: Ints, indices: Ints, rng: CounterRNG, config: PLMConfig) -> Bools:
    """Return which tokens of texts of these lengths belong to a span.  # [lengths.sum()]"""
    k = config.partial_prediction
    max_windows = -(-lengths // k)  # the shortest window has k tokens
    draws = uniform(rng.random_bits(indices, 2 * max_windows, "spans").reshape(-1, 2))  # [W, 2]
    rows = np.repeat(np.arange(len(lengths)), max_windows)
    span_lengths = 1 + (draws[:, 0] * config.max_span_length).astype(np.int64)  # [W]
    window_starts = cumsum_within_rows(k * span_lengths, rows)
    span_starts = window_starts + (draws[:, 1] * ((k - 1) * span_lengths + 1)).astype(np.int64)
    ends = np.minimum(span_starts + span_lengths, lengths[rows])
    is_inside = span_starts < ends
    text_starts = np.cumsum(lengths) - lengths
    changes = np.zeros(int(lengths.sum()) + 1, dtype=np.int64)  # +1 where a span starts, -1 after its end
    np.add.at(changes, (text_starts[rows] + span_starts)[is_inside], 1)
    np.add.at(changes, (text_starts[rows] + ends)[is_inside], -1)
    return np.cumsum(changes[:-1]) > 0
