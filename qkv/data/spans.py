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

from qkv.data.batches import Batch
from qkv.data.chance import Bools, Chance, Ints, Pieces, Words, before, drawn, uniform
from qkv.errors import InputError
from qkv.text.marks import Marks


@dataclass(frozen=True, kw_only=True)
class Spans:
    """What a recipe may say of spans; the paper's figures."""

    rate: float = 0.15  # share of the tokens that are asked for
    mean: float = 3.0  # length of a span

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise InputError(f"rate is {self.rate}; a share of spans lies between 0 and 1")
        if self.mean < 1:
            raise InputError(f"mean is {self.mean}; a span has at least one token")


SPANS = Spans()


class _Plan(NamedTuple):
    """Where the spans of each piece lie."""

    noise: Bools  # [T] lies in a span
    begins: Bools  # [T] is the first of one
    tokens: Ints  # [B] in spans
    spans: Ints  # [B]


def corrupt(pieces: Pieces, marks: Marks, chance: Chance, how: Spans = SPANS) -> Batch:
    """Source: the pieces with a sentinel for each span; target: each sentinel with its span, and one more sentinel.

    The end token that closes both is added where the model's start and end are known (`objectives.seq2seq.inputs`).
    """
    marks.check(pieces.ids)
    plan = _plan(pieces, chance, how)
    if marks.special[pieces.ids].any():
        plan = _around(plan, pieces, ~marks.special[pieces.ids])
    sentinels = _sentinels(marks, plan, pieces)
    rows, starts = pieces.rows, pieces.starts
    span = np.cumsum(plan.begins) - 1  # of the tokens in spans: which one, over all pieces
    place = span - (np.cumsum(plan.spans) - plan.spans)[rows]  # and within their own; elsewhere it means nothing
    kept = ~plan.noise | plan.begins
    source = np.where(plan.begins, sentinels[np.maximum(place, 0)], pieces.ids)[kept]

    lengths = plan.tokens + plan.spans + 1
    ends = np.cumsum(lengths)
    target = np.empty(ends[-1], dtype=np.int64)
    row, rank = rows[plan.noise], place[plan.noise]
    # a token in a span comes behind the tokens and sentinels before it, its own span's sentinel among them
    inside = before(np.ones_like(row), row) + rank + 1
    target[(ends - lengths)[row] + inside] = pieces.ids[plan.noise]
    first = plan.begins[plan.noise]
    target[((ends - lengths)[row] + inside - 1)[first]] = sentinels[rank[first]]
    target[ends - 1] = sentinels[plan.spans]
    sizes = np.add.reduceat(kept.astype(np.int64), starts)
    return Batch(*map(torch.from_numpy, (source, sizes, target, lengths)))


def longest_piece(source: int, how: Spans = SPANS) -> int:
    """How many tokens a piece may have for its source, closed by the end token, to have at most `source`."""
    length = source - 1
    while _longest_source(length + 1, how) <= source:
        length += 1
    return length


def _longest_source(length: int, how: Spans) -> int:
    tokens = max(int(how.rate * length), 1)
    return length - tokens + max(int(np.ceil(tokens / how.mean)), 1) + 1


def _plan(pieces: Pieces, chance: Chance, how: Spans) -> _Plan:
    """As many tokens and spans as rate and mean say, rounded up or down at random; all arrangements equally likely.

    Two spans have a token between them, or they would be one; a piece may begin and end with a span or without. A piece
    of two or more tokens has one span at least, and a token that stays.
    """
    lengths, numbers = pieces.lengths, pieces.numbers
    words = chance.words(numbers, lengths + 3, "span")  # two for rounding; then one for each choice below
    firsts = np.cumsum(lengths + 3) - (lengths + 3)
    tokens = (how.rate * lengths + uniform(words[firsts])).astype(np.int64)
    tokens = np.minimum(np.maximum(tokens, 1), lengths - 1)
    spans = (tokens / how.mean + uniform(words[firsts + 1])).astype(np.int64)
    spans = np.minimum(np.maximum(spans, 1), np.minimum(tokens, lengths - tokens + 1))
    sizes = _cut(_part(words, firsts + 2, tokens), tokens, spans)  # [spans.sum()]
    # The tokens that stay leave one gap more than they are, in which at most one span lies.
    gaps = lengths - tokens + 1
    row = np.repeat(np.arange(len(gaps)), gaps)
    taken = drawn(_part(words, firsts + 2 + tokens, gaps), np.ones_like(row), row, spans)
    gap = before(np.ones_like(row), row)[taken]  # as many tokens that stay lie before the span
    row = row[taken]
    first = pieces.starts[row] + gap + before(sizes, row)
    begins = np.zeros(len(pieces.ids), dtype=np.bool_)
    begins[first] = True
    edges = np.bincount(first, minlength=len(begins) + 1) - np.bincount(first + sizes, minlength=len(begins) + 1)
    return _Plan(np.cumsum(edges)[:-1] > 0, begins, tokens, spans)


def _around(plan: _Plan, pieces: Pieces, text: Bools) -> _Plan:
    """The same spans without the tokens that are no text."""
    noise = plan.noise & text
    begins = noise & (plan.begins | ~np.roll(noise, 1))
    tokens, spans = (np.add.reduceat(each.astype(np.int64), pieces.starts) for each in (noise, begins))
    return _Plan(noise, begins, tokens, spans)


def _cut(keys: Words, tokens: Ints, spans: Ints) -> Ints:
    """Sizes of the spans that each piece's tokens are cut into, every way to cut as likely as another."""
    row = np.repeat(np.arange(len(tokens)), tokens)
    keys[np.diff(row, prepend=-1) != 0] = 0  # a piece's first token begins a span in any case
    begins = drawn(keys, np.ones_like(row), row, spans)
    return np.bincount(np.cumsum(begins) - 1, minlength=int(spans.sum()))


def _part(words: Words, firsts: Ints, counts: Ints) -> Words:
    """`counts[i]` words from place `firsts[i]` on, for each i.  # [counts.sum()]"""
    row = np.repeat(np.arange(len(counts)), counts)
    part: Words = words[firsts[row] + before(np.ones_like(row), row)]
    return part


def _sentinels(marks: Marks, plan: _Plan, pieces: Pieces) -> Ints:
    needed = int(plan.spans.max()) + 1
    if not marks.sentinels:
        said = "this vocabulary has no sentinels, which stand for spans"
        raise InputError(f"text.tokenizer: {said}; train the tokeniser for t5 (qkv tokenizer train --family t5)")
    if needed > len(marks.sentinels):
        length = pieces.lengths[plan.spans.argmax()]
        said = f"a piece of {length} tokens needs {needed} sentinels and the vocabulary has {len(marks.sentinels)}"
        raise InputError(f"{said}; cut shorter pieces, or train the tokeniser with more <extra_id_0>, <extra_id_1>, …")
    return np.array(marks.sentinels, dtype=np.int64)
