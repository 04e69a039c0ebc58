"""Span corruption (Raffel et al. 2020): spans of text are replaced by sentinels, and the target lists them in order.

    source: Thank you <0> me to your party <1> week.
    target: <0> for inviting <1> last <2>

Special tokens, such as those between documents of one chunk, are never in a span: they split it in two.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from qkv.data.batching import PairBatch
from qkv.data.noise.config import DEFAULT_SPAN_CORRUPTION, SpanCorruptionConfig
from qkv.data.rng import Bools, CounterRNG, Ints, PackedChunks, RandomBits, cumsum_within_rows, sample_until, uniform
from qkv.errors import InputError
from qkv.tokenization.vocab_tables import VocabTables


class _SpanPlan(NamedTuple):
    """The positions of the spans."""

    is_noise: Bools  # [T] token is in a span
    is_span_start: Bools  # [T] token is the first of a span
    num_noise_tokens: Ints  # [B] tokens in spans
    num_spans: Ints  # [B]


def corrupt_spans(
    chunks: PackedChunks, vocab: VocabTables, rng: CounterRNG, config: SpanCorruptionConfig = DEFAULT_SPAN_CORRUPTION
) -> PairBatch:
    """Return pairs of source, with a sentinel for each span, and target: each sentinel with its span, then a sentinel.

    EOS is appended to both by `objectives.seq2seq.make_inputs`, which knows the model's special tokens.
    """
    vocab.check_ids(chunks.ids)
    plan = _plan_spans(chunks, rng, config)
    if vocab.is_special[chunks.ids].any():
        plan = _exclude_special(plan, chunks, ~vocab.is_special[chunks.ids])
    sentinels = _require_sentinels(vocab, plan, chunks)
    rows, starts = chunks.row_ids, chunks.starts
    span_index = np.cumsum(plan.is_span_start) - 1  # of a token in a span: index of the span in the batch
    rank_in_chunk = (
        span_index - (np.cumsum(plan.num_spans) - plan.num_spans)[rows]
    )  # and within their own; elsewhere it means nothing
    keep_mask = ~plan.is_noise | plan.is_span_start
    source = np.where(plan.is_span_start, sentinels[np.maximum(rank_in_chunk, 0)], chunks.ids)[keep_mask]

    target_lengths = plan.num_noise_tokens + plan.num_spans + 1
    target_ends = np.cumsum(target_lengths)
    target = np.empty(target_ends[-1], dtype=np.int64)
    noise_rows, rank = rows[plan.is_noise], rank_in_chunk[plan.is_noise]
    # a token of a span follows all earlier tokens of spans and their sentinels, including its own span's
    target_offset = cumsum_within_rows(np.ones_like(noise_rows), noise_rows) + rank + 1
    target[(target_ends - target_lengths)[noise_rows] + target_offset] = chunks.ids[plan.is_noise]
    is_first = plan.is_span_start[plan.is_noise]
    target[((target_ends - target_lengths)[noise_rows] + target_offset - 1)[is_first]] = sentinels[rank[is_first]]
    target[target_ends - 1] = sentinels[plan.num_spans]
    source_lengths = np.add.reduceat(keep_mask.astype(np.int64), starts)
    return PairBatch(*map(torch.from_numpy, (source, source_lengths, target, target_lengths)))


def max_chunk_tokens(max_source_length: int, config: SpanCorruptionConfig = DEFAULT_SPAN_CORRUPTION) -> int:
    """Return the longest chunk whose source, with EOS, has at most `max_source_length` tokens."""
    length = max_source_length - 1
    while _max_source_length(length + 1, config) <= max_source_length:
        length += 1
    return length


def _max_source_length(chunk_length: int, config: SpanCorruptionConfig) -> int:
    num_noise_tokens = max(int(config.noise_density * chunk_length), 1)
    return chunk_length - num_noise_tokens + max(int(np.ceil(num_noise_tokens / config.mean_noise_span_length)), 1) + 1


def _plan_spans(chunks: PackedChunks, rng: CounterRNG, config: SpanCorruptionConfig) -> _SpanPlan:
    """Draw the spans; their number and total length are randomly rounded, all arrangements are equally likely.

    There is at least one token between two spans; a chunk can begin and end with a span. A chunk of two or more tokens
    has at least one span and at least one token outside.
    """
    lengths, indices = chunks.lengths, chunks.indices
    bits = rng.random_bits(indices, lengths + 3, "span")  # two words for rounding, then one for each choice below
    bit_offsets = np.cumsum(lengths + 3) - (lengths + 3)
    num_noise_tokens = (config.noise_density * lengths + uniform(bits[bit_offsets])).astype(np.int64)
    num_noise_tokens = np.minimum(np.maximum(num_noise_tokens, 1), lengths - 1)
    num_spans = (num_noise_tokens / config.mean_noise_span_length + uniform(bits[bit_offsets + 1])).astype(np.int64)
    num_spans = np.minimum(np.maximum(num_spans, 1), np.minimum(num_noise_tokens, lengths - num_noise_tokens + 1))
    span_lengths = _random_partition(
        _slice_bits(bits, bit_offsets + 2, num_noise_tokens), num_noise_tokens, num_spans
    )  # [spans.sum()]
    # n tokens outside of spans have n + 1 gaps, each of which has at most one span
    gaps = lengths - num_noise_tokens + 1
    row = np.repeat(np.arange(len(gaps)), gaps)
    has_span = sample_until(
        _slice_bits(bits, bit_offsets + 2 + num_noise_tokens, gaps), np.ones_like(row), row, num_spans
    )
    gaps_before = cumsum_within_rows(np.ones_like(row), row)[
        has_span
    ]  # number of tokens outside of spans before the span
    row = row[has_span]
    span_starts = chunks.starts[row] + gaps_before + cumsum_within_rows(span_lengths, row)
    is_span_start = np.zeros(len(chunks.ids), dtype=np.bool_)
    is_span_start[span_starts] = True
    deltas = np.bincount(span_starts, minlength=len(is_span_start) + 1) - np.bincount(
        span_starts + span_lengths, minlength=len(is_span_start) + 1
    )
    return _SpanPlan(np.cumsum(deltas)[:-1] > 0, is_span_start, num_noise_tokens, num_spans)


def _exclude_special(plan: _SpanPlan, chunks: PackedChunks, is_text: Bools) -> _SpanPlan:
    """Remove the special tokens from the spans."""
    is_noise = plan.is_noise & is_text
    is_span_start = is_noise & (plan.is_span_start | ~np.roll(is_noise, 1))
    num_noise_tokens, num_spans = (
        np.add.reduceat(mask.astype(np.int64), chunks.starts) for mask in (is_noise, is_span_start)
    )
    return _SpanPlan(is_noise, is_span_start, num_noise_tokens, num_spans)


def _random_partition(keys: RandomBits, num_noise_tokens: Ints, num_spans: Ints) -> Ints:
    """Divide the noise tokens of each chunk into spans, all divisions equally likely; return the span lengths."""
    row = np.repeat(np.arange(len(num_noise_tokens)), num_noise_tokens)
    keys[np.diff(row, prepend=-1) != 0] = 0  # the first token of a chunk always begins a span
    is_span_start = sample_until(keys, np.ones_like(row), row, num_spans)
    return np.bincount(np.cumsum(is_span_start) - 1, minlength=int(num_spans.sum()))


def _slice_bits(bits: RandomBits, offsets: Ints, counts: Ints) -> RandomBits:
    """Return `counts[i]` words from `offsets[i]` on, for each i, concatenated.  # [counts.sum()]"""
    row = np.repeat(np.arange(len(counts)), counts)
    selected: RandomBits = bits[offsets[row] + cumsum_within_rows(np.ones_like(row), row)]
    return selected


def _require_sentinels(vocab: VocabTables, plan: _SpanPlan, chunks: PackedChunks) -> Ints:
    needed = int(plan.num_spans.max()) + 1
    if not vocab.sentinel_ids:
        reason = "this vocabulary has no sentinels for the spans"
        raise InputError(f"tokenizer.path: {reason}; train the tokenizer for t5 (qkv tokenizer train --family t5)")
    if needed > len(vocab.sentinel_ids):
        length = chunks.lengths[plan.num_spans.argmax()]
        reason = f"a chunk of {length} tokens needs {needed} sentinels and the vocabulary has {len(vocab.sentinel_ids)}"
        raise InputError(
            f"{reason}; use shorter chunks, or train the tokenizer with more <extra_id_0>, <extra_id_1>, …"
        )
    return np.array(vocab.sentinel_ids, dtype=np.int64)
