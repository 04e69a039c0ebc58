"""Span corruption: stretches of text are replaced by sentinels and asked for in order (Raffel et al. 2020).

    source: Thank you <0> me to your party <1> week.
    target: <0> for inviting <1> last <2>

Special tokens, such as those between documents that share a piece, lie in no span: they cut one in two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from qkv.data.batching import PairBatch
from qkv.data.rng import Bools, CounterRNG, Ints, PackedChunks, RandomBits, cumsum_within_rows, sample_until, uniform
from qkv.errors import InputError
from qkv.tokenization.vocab_tables import VocabTables


@dataclass(frozen=True, kw_only=True)
class SpanCorruptionConfig:
    """What a recipe may say of spans; the paper's figures."""

    noise_density: float = 0.15  # share of the tokens that are asked for
    mean_noise_span_length: float = 3.0  # length of a span

    def __post_init__(self) -> None:
        if not 0 < self.noise_density < 1:
            raise InputError(f"noise_density is {self.noise_density}; a share of spans lies between 0 and 1")
        if self.mean_noise_span_length < 1:
            raise InputError(f"mean_noise_span_length is {self.mean_noise_span_length}; a span has at least one token")


DEFAULT_SPAN_CORRUPTION = SpanCorruptionConfig()


class _SpanPlan(NamedTuple):
    """Where the spans of each piece lie."""

    is_noise: Bools  # [T] lies in a span
    is_span_start: Bools  # [T] is the first of one
    num_noise_tokens: Ints  # [B] in spans
    num_spans: Ints  # [B]


def corrupt_spans(chunks: PackedChunks, vocab: VocabTables, rng: CounterRNG, config: SpanCorruptionConfig = DEFAULT_SPAN_CORRUPTION) -> PairBatch:
    """Source: the pieces with a sentinel for each span; target: each sentinel with its span, and one more sentinel.

    The end token that closes both is added where the model's start and end are known (`objectives.seq2seq.make_inputs`).
    """
    vocab.check_ids(chunks.ids)
    plan = _plan_spans(chunks, rng, config)
    if vocab.is_special[chunks.ids].any():
        plan = _exclude_special(plan, chunks, ~vocab.is_special[chunks.ids])
    sentinels = _require_sentinels(vocab, plan, chunks)
    rows, starts = chunks.row_ids, chunks.starts
    span_index = np.cumsum(plan.is_span_start) - 1  # of the tokens in spans: which one, over all pieces
    rank_in_chunk = span_index - (np.cumsum(plan.num_spans) - plan.num_spans)[rows]  # and within their own; elsewhere it means nothing
    keep_mask = ~plan.is_noise | plan.is_span_start
    source = np.where(plan.is_span_start, sentinels[np.maximum(rank_in_chunk, 0)], chunks.ids)[keep_mask]

    target_lengths = plan.num_noise_tokens + plan.num_spans + 1
    target_ends = np.cumsum(target_lengths)
    target = np.empty(target_ends[-1], dtype=np.int64)
    noise_rows, rank = rows[plan.is_noise], rank_in_chunk[plan.is_noise]
    # a token in a span comes behind the tokens and sentinels before it, its own span's sentinel among them
    target_offset = cumsum_within_rows(np.ones_like(noise_rows), noise_rows) + rank + 1
    target[(target_ends - target_lengths)[noise_rows] + target_offset] = chunks.ids[plan.is_noise]
    is_first = plan.is_span_start[plan.is_noise]
    target[((target_ends - target_lengths)[noise_rows] + target_offset - 1)[is_first]] = sentinels[rank[is_first]]
    target[target_ends - 1] = sentinels[plan.num_spans]
    source_lengths = np.add.reduceat(keep_mask.astype(np.int64), starts)
    return PairBatch(*map(torch.from_numpy, (source, source_lengths, target, target_lengths)))


def max_chunk_tokens(max_source_length: int, config: SpanCorruptionConfig = DEFAULT_SPAN_CORRUPTION) -> int:
    """How many tokens a piece may have for its source, closed by the end token, to have at most `max_source_length`."""
    length = max_source_length - 1
    while _max_source_length(length + 1, config) <= max_source_length:
        length += 1
    return length


def _max_source_length(chunk_length: int, config: SpanCorruptionConfig) -> int:
    num_noise_tokens = max(int(config.noise_density * chunk_length), 1)
    return chunk_length - num_noise_tokens + max(int(np.ceil(num_noise_tokens / config.mean_noise_span_length)), 1) + 1


def _plan_spans(chunks: PackedChunks, rng: CounterRNG, config: SpanCorruptionConfig) -> _SpanPlan:
    """As many tokens and spans as rate and mean say, rounded up or down at random; all arrangements equally likely.

    Two spans have a token between them, or they would be one; a piece may begin and end with a span or without. A piece
    of two or more tokens has one span at least, and a token that stays.
    """
    lengths, indices = chunks.lengths, chunks.indices
    bits = rng.random_bits(indices, lengths + 3, "span")  # two for rounding; then one for each choice below
    bit_offsets = np.cumsum(lengths + 3) - (lengths + 3)
    num_noise_tokens = (config.noise_density * lengths + uniform(bits[bit_offsets])).astype(np.int64)
    num_noise_tokens = np.minimum(np.maximum(num_noise_tokens, 1), lengths - 1)
    num_spans = (num_noise_tokens / config.mean_noise_span_length + uniform(bits[bit_offsets + 1])).astype(np.int64)
    num_spans = np.minimum(np.maximum(num_spans, 1), np.minimum(num_noise_tokens, lengths - num_noise_tokens + 1))
    span_lengths = _random_partition(_slice_bits(bits, bit_offsets + 2, num_noise_tokens), num_noise_tokens, num_spans)  # [spans.sum()]
    # The tokens that stay leave one gap more than they are, in which at most one span lies.
    gaps = lengths - num_noise_tokens + 1
    row = np.repeat(np.arange(len(gaps)), gaps)
    has_span = sample_until(_slice_bits(bits, bit_offsets + 2 + num_noise_tokens, gaps), np.ones_like(row), row, num_spans)
    gaps_before = cumsum_within_rows(np.ones_like(row), row)[has_span]  # as many tokens that stay lie before the span
    row = row[has_span]
    span_starts = chunks.starts[row] + gaps_before + cumsum_within_rows(span_lengths, row)
    is_span_start = np.zeros(len(chunks.ids), dtype=np.bool_)
    is_span_start[span_starts] = True
    deltas = np.bincount(span_starts, minlength=len(is_span_start) + 1) - np.bincount(span_starts + span_lengths, minlength=len(is_span_start) + 1)
    return _SpanPlan(np.cumsum(deltas)[:-1] > 0, is_span_start, num_noise_tokens, num_spans)


def _exclude_special(plan: _SpanPlan, chunks: PackedChunks, is_text: Bools) -> _SpanPlan:
    """The same spans without the tokens that are no text."""
    is_noise = plan.is_noise & is_text
    is_span_start = is_noise & (plan.is_span_start | ~np.roll(is_noise, 1))
    num_noise_tokens, num_spans = (np.add.reduceat(mask.astype(np.int64), chunks.starts) for mask in (is_noise, is_span_start))
    return _SpanPlan(is_noise, is_span_start, num_noise_tokens, num_spans)


def _random_partition(keys: RandomBits, num_noise_tokens: Ints, num_spans: Ints) -> Ints:
    """Sizes of the spans that each piece's tokens are cut into, every way to cut as likely as another."""
    row = np.repeat(np.arange(len(num_noise_tokens)), num_noise_tokens)
    keys[np.diff(row, prepend=-1) != 0] = 0  # a piece's first token begins a span in any case
    is_span_start = sample_until(keys, np.ones_like(row), row, num_spans)
    return np.bincount(np.cumsum(is_span_start) - 1, minlength=int(num_spans.sum()))


def _slice_bits(bits: RandomBits, offsets: Ints, counts: Ints) -> RandomBits:
    """`counts[i]` words from place `offsets[i]` on, for each i.  # [counts.sum()]"""
    row = np.repeat(np.arange(len(counts)), counts)
    selected: RandomBits = bits[offsets[row] + cumsum_within_rows(np.ones_like(row), row)]
    return selected


def _require_sentinels(vocab: VocabTables, plan: _SpanPlan, chunks: PackedChunks) -> Ints:
    needed = int(plan.num_spans.max()) + 1
    if not vocab.sentinel_ids:
        reason = "this vocabulary has no sentinels, which stand for spans"
        raise InputError(f"tokenizer.path: {reason}; train the tokeniser for t5 (qkv tokenizer train --family t5)")
    if needed > len(vocab.sentinel_ids):
        length = chunks.lengths[plan.num_spans.argmax()]
        reason = f"a piece of {length} tokens needs {needed} sentinels and the vocabulary has {len(vocab.sentinel_ids)}"
        raise InputError(f"{reason}; cut shorter pieces, or train the tokeniser with more <extra_id_0>, <extra_id_1>, …")
    return np.array(vocab.sentinel_ids, dtype=np.int64)
