"""Masking for masked language modeling (Devlin et al. 2019). Special tokens are never masked."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qkv.data.noise.config import DEFAULT_MLM, MLMConfig
from qkv.data.rng import Bools, CounterRNG, PackedChunks, sample_until, uniform
from qkv.errors import InputError
from qkv.tokenization.vocab_tables import VocabTables


class MaskedBatch(NamedTuple):
    """Packed chunks with masks, and the original tokens at the selected positions."""

    ids: Tensor  # [T]
    lengths: Tensor  # [B]
    positions: Tensor  # [M] indices into `ids`, increasing
    labels: Tensor  # [M]


def mask_tokens(
    chunks: PackedChunks, vocab: VocabTables, rng: CounterRNG, config: MLMConfig = DEFAULT_MLM
) -> MaskedBatch:
    """Select tokens for prediction and replace them by the mask token, a random token, or themselves.

    In a chunk with n text tokens, `mask_prob * n` tokens are selected, randomly rounded up or down so that the expected
    number is exact. A short chunk may therefore have none; the BERT code selects at least one, which selects more than
    `mask_prob` of the tokens of short sentences. With whole words, the last word drawn is included with the probability
    that keeps the expectation exact. The replacement is drawn for each token independently, also within a word.
    """
    vocab.check_ids(chunks.ids)
    rows, is_text = chunks.row_ids, ~vocab.is_special[chunks.ids]
    bits = rng.random_bits(chunks.indices, 4 * chunks.lengths, "mask").reshape(-1, 4)  # [T, 4]
    is_word_start = is_text & ~_continues_word(chunks, is_text, vocab) if config.whole_word else is_text
    word_lengths = np.bincount(np.cumsum(is_word_start)[is_text] - 1)  # [W]
    target_counts = config.mask_prob * np.bincount(rows[is_text], minlength=len(chunks.lengths))  # [B]
    rounding_draw = uniform(bits[chunks.starts, 3])
    selected_words = sample_until(
        bits[is_word_start, 0], word_lengths, rows[is_word_start], target_counts, rounding_draw
    )
    is_selected = is_text.copy()
    is_selected[is_text] = np.repeat(selected_words, word_lengths)
    positions = np.flatnonzero(is_selected)
    action_draws = uniform(bits[positions, 1])
    random_ids = vocab.text_ids[(uniform(bits[positions, 2]) * len(vocab.text_ids)).astype(np.int64)]
    ids = chunks.ids.copy()
    is_replaced = action_draws < config.mask_token_prob + config.random_token_prob
    not_masked = np.where(is_replaced, random_ids, ids[positions])
    ids[positions] = np.where(action_draws < config.mask_token_prob, require_mask_id(vocab), not_masked)
    return MaskedBatch(*map(torch.from_numpy, (ids, chunks.lengths, positions, chunks.ids[positions])))


def _continues_word(chunks: PackedChunks, is_text: Bools, vocab: VocabTables) -> Bools:
    """Return which tokens belong to the same word as the token before them.  # [T]"""
    if vocab.is_subword_continuation is None:
        raise InputError("this vocabulary does not mark where a word begins; set whole_word: false")
    follows_text = np.roll(is_text, 1)
    follows_text[chunks.starts] = False
    return follows_text & vocab.is_subword_continuation[chunks.ids]


def require_mask_id(vocab: VocabTables) -> int:
    """Return the id of the mask token; a vocabulary without one is refused."""
    if vocab.mask_id is None:
        hint = "train the tokenizer for bert, roberta or bart, which have one (qkv tokenizer train --family)"
        raise InputError(f"tokenizer.path: this vocabulary has no mask token; {hint}")
    return vocab.mask_id
