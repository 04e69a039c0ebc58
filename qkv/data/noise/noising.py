"""Text spoilt for a model to restore: BERT's masks (Devlin et al. 2019) and BART's noises (Lewis et al. 2020).

Special tokens stay what and where they are: none is masked, deleted, covered or moved from a piece's ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qkv.data.batching import PairBatch
from qkv.data.rng import Bools, CounterRNG, Ints, PackedChunks, cumsum_within_rows, poisson, sample_until, uniform
from qkv.errors import InputError
from qkv.tokenization.vocab_tables import VocabTables


def _check_fractions(config: object, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(config, name) <= 1:
            raise InputError(f"{name} is {getattr(config, name)}; a share lies between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class MLMConfig:
    """What a recipe may say of masks; the paper's figures."""

    mask_prob: float = 0.15  # share of the tokens of text that are asked for
    mask_token_prob: float = 0.8  # of those, the share that becomes the mask token
    random_token_prob: float = 0.1  # and the share that becomes any token of text; the rest stays as it is
    whole_word: bool = False  # a word is asked for with all its tokens or not at all

    def __post_init__(self) -> None:
        _check_fractions(self, "mask_prob", "mask_token_prob", "random_token_prob")
        if self.mask_token_prob + self.random_token_prob > 1:
            raise InputError(f"mask_token_prob {self.mask_token_prob} and random_token_prob {self.random_token_prob} are more than all; keep the sum at most 1")


@dataclass(frozen=True, kw_only=True)
class DenoisingConfig:
    """What a recipe may say of noises, in the order in which they are made; those of BART's final model."""

    permute_sentences: bool = True  # the sentences are shuffled
    rotate_prob: float = 0.0  # share of the pieces that begin at another token
    delete_prob: float = 0.0  # share of the tokens that are missing
    infill_ratio: float = 0.3  # share of the tokens that lie in spans, each of which one mask token stands for
    poisson_lambda: float = 3.0  # length of such a span, Poisson; a span of no token puts a mask between two

    def __post_init__(self) -> None:
        _check_fractions(self, "rotate_prob", "delete_prob", "infill_ratio")
        if self.poisson_lambda <= 0:
            raise InputError(f"poisson_lambda is {self.poisson_lambda}; spans need a mean length above 0")


DEFAULT_MLM, DEFAULT_DENOISING = MLMConfig(), DenoisingConfig()


class MaskedBatch(NamedTuple):
    """Packed pieces with masks, and what stood there."""

    ids: Tensor  # [T]
    lengths: Tensor  # [B]
    positions: Tensor  # [M] places in the run of all tokens, rising
    labels: Tensor  # [M]


def mask_tokens(chunks: PackedChunks, vocab: VocabTables, rng: CounterRNG, config: MLMConfig = DEFAULT_MLM) -> MaskedBatch:
    """Masks for masked language modelling.

    In a piece with n tokens of text the number asked for is rate * n, rounded up or down at random so that its
    expectation is just that. A short piece may thus have none: one at least, as in the authors' code, would ask for
    more than the paper's share of short sentences. With whole words the last word drawn is kept or not likewise.
    Each token's fate (mask, another token, itself) is its own, also within a word.
    """
    vocab.check_ids(chunks.ids)
    rows, is_text = chunks.row_ids, ~vocab.is_special[chunks.ids]
    bits = rng.random_bits(chunks.indices, 4 * chunks.lengths, "mask").reshape(-1, 4)  # [T, 4]
    is_word_start = is_text & ~_continues_word(chunks, is_text, vocab) if config.whole_word else is_text
    word_lengths = np.bincount(np.cumsum(is_word_start)[is_text] - 1)  # of each word
    target_counts = config.mask_prob * np.bincount(rows[is_text], minlength=len(chunks.lengths))
    rounding_draw = uniform(bits[chunks.starts, 3])
    is_selected = is_text.copy()
    is_selected[is_text] = np.repeat(sample_until(bits[is_word_start, 0], word_lengths, rows[is_word_start], target_counts, rounding_draw), word_lengths)
    positions = np.flatnonzero(is_selected)
    action_draws = uniform(bits[positions, 1])
    random_ids = vocab.text_ids[(uniform(bits[positions, 2]) * len(vocab.text_ids)).astype(np.int64)]
    ids = chunks.ids.copy()
    ids[positions] = np.where(action_draws < config.mask_token_prob, _require_mask_id(vocab), np.where(action_draws < config.mask_token_prob + config.random_token_prob, random_ids, ids[positions]))
    return MaskedBatch(*map(torch.from_numpy, (ids, chunks.lengths, positions, chunks.ids[positions])))


def _continues_word(chunks: PackedChunks, is_text: Bools, vocab: VocabTables) -> Bools:
    """Which tokens belong to the word of the token before them.  # [T]"""
    if vocab.is_subword_continuation is None:
        raise InputError("this vocabulary does not tell where a word begins; set whole_word: false")
    follows_text = np.roll(is_text, 1)  # text stands before it
    follows_text[chunks.starts] = False
    return follows_text & vocab.is_subword_continuation[chunks.ids]


def add_noise(chunks: PackedChunks, vocab: VocabTables, rng: CounterRNG, config: DenoisingConfig = DEFAULT_DENOISING) -> PairBatch:
    """Source: the pieces with noise; target: the pieces as they are."""
    source = permute_sentences(chunks, vocab, rng) if config.permute_sentences else chunks
    source = rotate_chunks(source, vocab, rng, config.rotate_prob) if config.rotate_prob else source
    source = delete_tokens(source, vocab, rng, config.delete_prob) if config.delete_prob else source
    source = infill_spans(source, vocab, rng, config.infill_ratio, config.poisson_lambda) if config.infill_ratio else source
    return PairBatch(*map(torch.from_numpy, (source.ids, source.lengths, chunks.ids, chunks.lengths)))


def permute_sentences(chunks: PackedChunks, vocab: VocabTables, rng: CounterRNG) -> PackedChunks:
    """The sentences of each piece in random order; a sentence ends behind a full stop."""
    if vocab.is_sentence_end is None:
        raise InputError("this vocabulary does not tell where a sentence ends; set permute_sentences: false")
    is_body, body_start, _ = _text_body(chunks, vocab)
    is_sentence_start = np.roll(vocab.is_sentence_end[chunks.ids] & is_body, 1) & is_body  # a stop stands before it
    is_sentence_start[body_start[body_start < len(chunks.ids)]] = True
    bits = rng.random_bits(chunks.indices, chunks.lengths, "sort")
    positions = np.arange(len(chunks.ids))
    # what stands before the body keeps the smallest key, and what stands behind it the largest
    sort_keys = np.where(positions < body_start[chunks.row_ids], np.uint64(0), np.uint64(2**64 - 1))
    sort_keys[is_body] = bits[is_sentence_start][np.cumsum(is_sentence_start)[is_body] - 1]
    order = np.lexsort((sort_keys, chunks.row_ids))  # stable: within a sentence nothing moves
    return chunks._replace(ids=chunks.ids[order])


def rotate_chunks(chunks: PackedChunks, vocab: VocabTables, rng: CounterRNG, prob: float = 1.0) -> PackedChunks:
    """A token is chosen, any as likely as another, and the piece begins with it; what stood before it comes last."""
    is_body, body_start, body_length = _text_body(chunks, vocab)
    draws = uniform(rng.random_bits(chunks.indices, np.full_like(chunks.lengths, 2), "turn")).reshape(-1, 2)  # [B, 2]
    rotation = np.where(draws[:, 0] < prob, (draws[:, 1] * body_length).astype(np.int64), 0)
    gather_indices = np.arange(len(chunks.ids))
    rows = chunks.row_ids[is_body]
    gather_indices[is_body] = body_start[rows] + (gather_indices[is_body] - body_start[rows] + rotation[rows]) % body_length[rows]
    return chunks._replace(ids=chunks.ids[gather_indices])


def delete_tokens(chunks: PackedChunks, vocab: VocabTables, rng: CounterRNG, prob: float) -> PackedChunks:
    """A share of the tokens is gone without a trace; a piece keeps one at least."""
    vocab.check_ids(chunks.ids)
    rows, is_text = chunks.row_ids, ~vocab.is_special[chunks.ids]
    bits = rng.random_bits(chunks.indices, 1 + chunks.lengths, "gone")
    chunk_offsets = chunks.starts + np.arange(len(chunks.lengths))  # of each piece's words
    keys = np.delete(bits, chunk_offsets)
    target_counts = np.minimum(prob * np.bincount(rows[is_text], minlength=len(chunks.lengths)), chunks.lengths - 1)
    keep_mask = ~is_text
    keep_mask[is_text] = ~sample_until(keys[is_text], np.ones(is_text.sum(), np.int64), rows[is_text], target_counts, uniform(bits[chunk_offsets]))
    return chunks._replace(ids=chunks.ids[keep_mask], lengths=np.bincount(rows[keep_mask], minlength=len(chunks.lengths)))


def infill_spans(chunks: PackedChunks, vocab: VocabTables, rng: CounterRNG, ratio: float = 0.3, poisson_lambda: float = 3.0) -> PackedChunks:
    """Spans of Poisson length are drawn until a share of the tokens lies in them, and each becomes one mask token.

    Spans never overlap: they are put at random between the tokens that stay. One that would take the share over its
    limit is kept with the probability that makes the expected share just `ratio`.
    """
    run_ids, run_lengths, is_text_run = _text_runs(chunks, vocab)  # each token's run; [R], [R]
    target_counts = np.where(is_text_run, ratio * run_lengths, 0.0)
    max_spans = np.where(is_text_run, np.ceil(2 * target_counts / poisson_lambda).astype(np.int64) + 32, 0)  # draws that suffice, and to spare
    run_rows = chunks.row_ids[np.cumsum(run_lengths) - 1]  # each run's piece

    def sum_per_chunk(counts: Ints) -> Ints:
        return np.bincount(run_rows, weights=counts, minlength=len(chunks.lengths)).astype(np.int64)

    bits = rng.random_bits(chunks.indices, 2 * sum_per_chunk(1 + max_spans), "fill").reshape(-1, 2)  # [R + tries.sum(), 2]
    run_offsets = np.cumsum(1 + max_spans) - 1 - max_spans
    rounding_draw, bits = uniform(bits[run_offsets, 0]), np.delete(bits, run_offsets, axis=0)
    run = np.repeat(np.arange(len(run_lengths)), max_spans)  # each span's
    span_lengths = poisson(uniform(bits[:, 0]), poisson_lambda)
    tokens_before = cumsum_within_rows(span_lengths, run)
    span_lengths = np.clip(run_lengths[run] - tokens_before, 0, span_lengths)  # none is longer than what is left
    is_used = tokens_before + rounding_draw[run] * span_lengths < target_counts[run]
    run, span_lengths = run[is_used], span_lengths[is_used]
    span_lengths = span_lengths[np.lexsort((bits[is_used, 1], run))]  # the last one drawn tends to be long, and may lie anywhere

    span_counts = np.bincount(run, minlength=len(run_lengths))
    slot_counts = run_lengths - np.bincount(run, weights=span_lengths, minlength=len(run_lengths)).astype(np.int64) + span_counts
    keys = rng.random_bits(chunks.indices, sum_per_chunk(slot_counts), "slot")
    run = np.repeat(np.arange(len(run_lengths)), slot_counts)  # now each slot's: a slot is a span or a token that stays
    is_span = sample_until(keys, np.ones_like(run), run, span_counts)
    slot_lengths = np.ones_like(run)
    slot_lengths[is_span] = span_lengths
    slot_starts = np.minimum(np.cumsum(slot_lengths) - slot_lengths, len(run_ids) - 1)
    # a vocabulary without a mask may have sentinels, the first of which then stands for every span
    mask_id = vocab.sentinel_ids[0] if vocab.mask_id is None and vocab.sentinel_ids else _require_mask_id(vocab)
    ids = np.where(is_span, mask_id, chunks.ids[slot_starts])
    return chunks._replace(ids=ids, lengths=sum_per_chunk(slot_counts))


def _text_runs(chunks: PackedChunks, vocab: VocabTables) -> tuple[Ints, Ints, Bools]:
    """Stretches of text, and special tokens one by one: each token's stretch [T], their sizes, which are text [R]."""
    vocab.check_ids(chunks.ids)
    is_text = ~vocab.is_special[chunks.ids]
    is_run_start = ~is_text | ~np.roll(is_text, 1)
    is_run_start[chunks.starts] = True
    run_ids = np.cumsum(is_run_start) - 1
    return run_ids, np.bincount(run_ids), is_text[is_run_start]


def _text_body(chunks: PackedChunks, vocab: VocabTables) -> tuple[Bools, Ints, Ints]:
    """What lies between the special tokens at a piece's ends: which tokens [T], its first place and its size [B]."""
    vocab.check_ids(chunks.ids)
    positions, is_text = np.arange(len(chunks.ids)), ~vocab.is_special[chunks.ids]
    body_start = np.minimum.reduceat(np.where(is_text, positions, len(positions)), chunks.starts)
    body_last = np.maximum.reduceat(np.where(is_text, positions, -1), chunks.starts)
    is_body = (positions >= body_start[chunks.row_ids]) & (positions <= body_last[chunks.row_ids])
    return is_body, body_start, np.maximum(body_last - body_start + 1, 0)


def _require_mask_id(vocab: VocabTables) -> int:
    if vocab.mask_id is None:
        hint = "train the tokeniser for bert, roberta or bart, which have one (qkv tokenizer train --family)"
        raise InputError(f"tokenizer.path: this vocabulary has no mask token; {hint}")
    return vocab.mask_id
