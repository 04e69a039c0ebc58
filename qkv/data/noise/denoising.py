"""BART's noise functions (Lewis et al. 2020): the model restores the original chunk from the noisy one.

Special tokens are never deleted or covered by a span, and those at the ends of a chunk keep their positions.
"""

from __future__ import annotations

import numpy as np
import torch

from qkv.data.batching import PairBatch
from qkv.data.noise.config import DEFAULT_DENOISING, DenoisingConfig
from qkv.data.noise.mlm import require_mask_id
from qkv.data.rng import Bools, CounterRNG, Ints, PackedChunks, cumsum_within_rows, poisson, sample_until, uniform
from qkv.errors import InputError
from qkv.tokenization.vocab_tables import VocabTables


def add_noise(
    chunks: PackedChunks, vocab: VocabTables, rng: CounterRNG, config: DenoisingConfig = DEFAULT_DENOISING
) -> PairBatch:
    """Return pairs of a noisy chunk (source) and the original chunk (target)."""
    source = permute_sentences(chunks, vocab, rng) if config.permute_sentences else chunks
    if config.rotate_prob:
        source = rotate_chunks(source, vocab, rng, config.rotate_prob)
    if config.delete_prob:
        source = delete_tokens(source, vocab, rng, config.delete_prob)
    if config.infill_ratio:
        source = infill_spans(source, vocab, rng, config.infill_ratio, config.poisson_lambda)
    return PairBatch(*map(torch.from_numpy, (source.ids, source.lengths, chunks.ids, chunks.lengths)))


def permute_sentences(chunks: PackedChunks, vocab: VocabTables, rng: CounterRNG) -> PackedChunks:
    """Shuffle the sentences of each chunk; a sentence ends after a token that ends in a full stop, "?" or "!"."""
    if vocab.is_sentence_end is None:
        raise InputError("this vocabulary does not mark where a sentence ends; set permute_sentences: false")
    is_body, body_start, _ = _text_body(chunks, vocab)
    is_sentence_start = np.roll(vocab.is_sentence_end[chunks.ids] & is_body, 1) & is_body
    is_sentence_start[body_start[body_start < len(chunks.ids)]] = True
    bits = rng.random_bits(chunks.indices, chunks.lengths, "sort")
    positions = np.arange(len(chunks.ids))
    # special tokens before the body get the smallest sort key, those after it the largest
    sort_keys = np.where(positions < body_start[chunks.row_ids], np.uint64(0), np.uint64(2**64 - 1))
    sort_keys[is_body] = bits[is_sentence_start][np.cumsum(is_sentence_start)[is_body] - 1]
    order = np.lexsort((sort_keys, chunks.row_ids))  # stable, so the order within a sentence does not change
    return chunks._replace(ids=chunks.ids[order])


def rotate_chunks(chunks: PackedChunks, vocab: VocabTables, rng: CounterRNG, prob: float = 1.0) -> PackedChunks:
    """Rotate a fraction `prob` of the chunks so that each begins with a uniformly drawn token of its text."""
    is_body, body_start, body_length = _text_body(chunks, vocab)
    draws = uniform(rng.random_bits(chunks.indices, np.full_like(chunks.lengths, 2), "turn")).reshape(-1, 2)  # [B, 2]
    rotation = np.where(draws[:, 0] < prob, (draws[:, 1] * body_length).astype(np.int64), 0)
    gather_indices = np.arange(len(chunks.ids))
    rows = chunks.row_ids[is_body]
    offsets = (gather_indices[is_body] - body_start[rows] + rotation[rows]) % body_length[rows]
    gather_indices[is_body] = body_start[rows] + offsets
    return chunks._replace(ids=chunks.ids[gather_indices])


def delete_tokens(chunks: PackedChunks, vocab: VocabTables, rng: CounterRNG, prob: float) -> PackedChunks:
    """Delete a fraction `prob` of the text tokens; a chunk keeps at least one token."""
    vocab.check_ids(chunks.ids)
    rows, is_text = chunks.row_ids, ~vocab.is_special[chunks.ids]
    bits = rng.random_bits(chunks.indices, 1 + chunks.lengths, "gone")  # one draw for rounding, then one per token
    chunk_offsets = chunks.starts + np.arange(len(chunks.lengths))  # of each chunk's draws in `bits`
    keys, rounding_draw = np.delete(bits, chunk_offsets), uniform(bits[chunk_offsets])
    target_counts = np.minimum(prob * np.bincount(rows[is_text], minlength=len(chunks.lengths)), chunks.lengths - 1)
    item_sizes = np.ones(is_text.sum(), np.int64)
    keep_mask = ~is_text
    keep_mask[is_text] = ~sample_until(keys[is_text], item_sizes, rows[is_text], target_counts, rounding_draw)
    lengths = np.bincount(rows[keep_mask], minlength=len(chunks.lengths))
    return chunks._replace(ids=chunks.ids[keep_mask], lengths=lengths)


def infill_spans(
    chunks: PackedChunks, vocab: VocabTables, rng: CounterRNG, ratio: float = 0.3, poisson_lambda: float = 3.0
) -> PackedChunks:
    """Draw spans of Poisson length until they cover a fraction `ratio` of the tokens; replace each by one mask token.

    Spans never overlap: they are distributed at random between the tokens that stay. The span that crosses the limit is
    included with the probability that makes the expected fraction exactly `ratio`.
    """
    run_ids, run_lengths, is_text_run = _text_runs(chunks, vocab)  # [T], [R], [R]
    target_counts = np.where(is_text_run, ratio * run_lengths, 0.0)
    # more draws than are ever needed
    max_spans = np.where(is_text_run, np.ceil(2 * target_counts / poisson_lambda).astype(np.int64) + 32, 0)
    run_rows = chunks.row_ids[np.cumsum(run_lengths) - 1]  # [R] the chunk of each run

    def sum_per_chunk(counts: Ints) -> Ints:
        return np.bincount(run_rows, weights=counts, minlength=len(chunks.lengths)).astype(np.int64)

    # [R + max_spans.sum(), 2]
    bits = rng.random_bits(chunks.indices, 2 * sum_per_chunk(1 + max_spans), "fill").reshape(-1, 2)
    run_offsets = np.cumsum(1 + max_spans) - 1 - max_spans
    rounding_draw, bits = uniform(bits[run_offsets, 0]), np.delete(bits, run_offsets, axis=0)
    run = np.repeat(np.arange(len(run_lengths)), max_spans)  # the run of each span
    span_lengths = poisson(uniform(bits[:, 0]), poisson_lambda)
    tokens_before = cumsum_within_rows(span_lengths, run)
    span_lengths = np.clip(run_lengths[run] - tokens_before, 0, span_lengths)  # at most the tokens that are left
    is_used = tokens_before + rounding_draw[run] * span_lengths < target_counts[run]
    run, span_lengths = run[is_used], span_lengths[is_used]
    # shuffled, because the last span drawn tends to be long and must not always come last
    span_lengths = span_lengths[np.lexsort((bits[is_used, 1], run))]

    span_counts = np.bincount(run, minlength=len(run_lengths))
    covered_counts = np.bincount(run, weights=span_lengths, minlength=len(run_lengths)).astype(np.int64)
    slot_counts = run_lengths - covered_counts + span_counts
    keys = rng.random_bits(chunks.indices, sum_per_chunk(slot_counts), "slot")
    run = np.repeat(np.arange(len(run_lengths)), slot_counts)  # the run of each slot: a span or a token that stays
    is_span = sample_until(keys, np.ones_like(run), run, span_counts)
    slot_lengths = np.ones_like(run)
    slot_lengths[is_span] = span_lengths
    slot_starts = np.minimum(np.cumsum(slot_lengths) - slot_lengths, len(run_ids) - 1)
    # a vocabulary with sentinels but no mask token uses its first sentinel for every span
    mask_id = vocab.sentinel_ids[0] if vocab.mask_id is None and vocab.sentinel_ids else require_mask_id(vocab)
    ids = np.where(is_span, mask_id, chunks.ids[slot_starts])
    return chunks._replace(ids=ids, lengths=sum_per_chunk(slot_counts))


def _text_runs(chunks: PackedChunks, vocab: VocabTables) -> tuple[Ints, Ints, Bools]:
    """Divide the tokens into runs: maximal runs of text, and each special token by itself.

    Returns the run of each token [T], the run lengths [R], and which runs are text [R].
    """
    vocab.check_ids(chunks.ids)
    is_text = ~vocab.is_special[chunks.ids]
    is_run_start = ~is_text | ~np.roll(is_text, 1)
    is_run_start[chunks.starts] = True
    run_ids = np.cumsum(is_run_start) - 1
    return run_ids, np.bincount(run_ids), is_text[is_run_start]


def _text_body(chunks: PackedChunks, vocab: VocabTables) -> tuple[Bools, Ints, Ints]:
    """Return the tokens between the special tokens at the ends of each chunk: mask [T], first index [B], length [B]."""
    vocab.check_ids(chunks.ids)
    positions, is_text = np.arange(len(chunks.ids)), ~vocab.is_special[chunks.ids]
    body_start = np.minimum.reduceat(np.where(is_text, positions, len(positions)), chunks.starts)
    body_last = np.maximum.reduceat(np.where(is_text, positions, -1), chunks.starts)
    is_body = (positions >= body_start[chunks.row_ids]) & (positions <= body_last[chunks.row_ids])
    return is_body, body_start, np.maximum(body_last - body_start + 1, 0)
