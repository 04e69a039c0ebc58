"""Text spoilt for a model to restore: BERT's masks (Devlin et al. 2019) and BART's noises (Lewis et al. 2020).

Special tokens stay what and where they are: none is masked, deleted, covered or moved from a piece's ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qkv.data.batches import Batch
from qkv.data.chance import Bools, Chance, Ints, Pieces, before, drawn, poisson, uniform
from qkv.errors import InputError
from qkv.text.marks import Marks


def _shares(settings: object, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(settings, name) <= 1:
            raise InputError(f"{name} is {getattr(settings, name)}; a share lies between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class Masking:
    """What a recipe may say of masks; the paper's figures."""

    rate: float = 0.15  # share of the tokens of text that are asked for
    masked: float = 0.8  # of those, the share that becomes the mask token
    random: float = 0.1  # and the share that becomes any token of text; the rest stays as it is
    whole_words: bool = False  # a word is asked for with all its tokens or not at all

    def __post_init__(self) -> None:
        _shares(self, "rate", "masked", "random")
        if self.masked + self.random > 1:
            raise InputError(f"masked {self.masked} and random {self.random} are more than all; keep the sum at most 1")


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What a recipe may say of noises, in the order in which they are made; those of BART's final model."""

    permute: bool = True  # the sentences are shuffled
    rotate: float = 0.0  # share of the pieces that begin at another token
    delete: float = 0.0  # share of the tokens that are missing
    infill: float = 0.3  # share of the tokens that lie in spans, each of which one mask token stands for
    mean: float = 3.0  # length of such a span, Poisson; a span of no token puts a mask between two

    def __post_init__(self) -> None:
        _shares(self, "rotate", "delete", "infill")
        if self.mean <= 0:
            raise InputError(f"mean is {self.mean}; spans need a mean length above 0")


MASKING, NOISE = Masking(), Noise()


class Masked(NamedTuple):
    """Packed pieces with masks, and what stood there."""

    ids: Tensor  # [T]
    lengths: Tensor  # [B]
    at: Tensor  # [M] places in the run of all tokens, rising
    labels: Tensor  # [M]


def mask(pieces: Pieces, marks: Marks, chance: Chance, how: Masking = MASKING) -> Masked:
    """Masks for masked language modelling.

    In a piece with n tokens of text the number asked for is rate * n, rounded up or down at random so that its
    expectation is just that. A short piece may thus have none: one at least, as in the authors' code, would ask for
    more than the paper's share of short sentences. With whole words the last word drawn is kept or not likewise.
    Each token's fate (mask, another token, itself) is its own, also within a word.
    """
    marks.check(pieces.ids)
    rows, text = pieces.rows, ~marks.special[pieces.ids]
    words = chance.words(pieces.numbers, 4 * pieces.lengths, "mask").reshape(-1, 4)  # [T, 4]
    begins = text & ~_goes_on(pieces, text, marks) if how.whole_words else text
    sizes = np.bincount(np.cumsum(begins)[text] - 1)  # of each word
    wanted = how.rate * np.bincount(rows[text], minlength=len(pieces.lengths))
    luck = uniform(words[pieces.starts, 3])
    asked = text.copy()
    asked[text] = np.repeat(drawn(words[begins, 0], sizes, rows[begins], wanted, luck), sizes)
    at = np.flatnonzero(asked)
    fate = uniform(words[at, 1])
    other = marks.ordinary[(uniform(words[at, 2]) * len(marks.ordinary)).astype(np.int64)]
    ids = pieces.ids.copy()
    ids[at] = np.where(fate < how.masked, _mask(marks), np.where(fate < how.masked + how.random, other, ids[at]))
    return Masked(*map(torch.from_numpy, (ids, pieces.lengths, at, pieces.ids[at])))


def _goes_on(pieces: Pieces, text: Bools, marks: Marks) -> Bools:
    """Which tokens belong to the word of the token before them.  # [T]"""
    if marks.continues is None:
        raise InputError("this vocabulary does not tell where a word begins; set whole_words: false")
    follows = np.roll(text, 1)  # text stands before it
    follows[pieces.starts] = False
    return follows & marks.continues[pieces.ids]


def spoil(pieces: Pieces, marks: Marks, chance: Chance, noise: Noise = NOISE) -> Batch:
    """Source: the pieces with noise; target: the pieces as they are."""
    source = permute(pieces, marks, chance) if noise.permute else pieces
    source = rotate(source, marks, chance, noise.rotate) if noise.rotate else source
    source = delete(source, marks, chance, noise.delete) if noise.delete else source
    source = infill(source, marks, chance, noise.infill, noise.mean) if noise.infill else source
    return Batch(*map(torch.from_numpy, (source.ids, source.lengths, pieces.ids, pieces.lengths)))


def permute(pieces: Pieces, marks: Marks, chance: Chance) -> Pieces:
    """The sentences of each piece in random order; a sentence ends behind a full stop."""
    if marks.stops is None:
        raise InputError("this vocabulary does not tell where a sentence ends; set permute: false")
    body, first, _ = _body(pieces, marks)
    begins = np.roll(marks.stops[pieces.ids] & body, 1) & body  # a stop stands before it
    begins[first[first < len(pieces.ids)]] = True
    keys = chance.words(pieces.numbers, pieces.lengths, "sort")
    place = np.arange(len(pieces.ids))
    # what stands before the body keeps the smallest key, and what stands behind it the largest
    key = np.where(place < first[pieces.rows], np.uint64(0), np.uint64(2**64 - 1))
    key[body] = keys[begins][np.cumsum(begins)[body] - 1]
    order = np.lexsort((key, pieces.rows))  # stable: within a sentence nothing moves
    return pieces._replace(ids=pieces.ids[order])


def rotate(pieces: Pieces, marks: Marks, chance: Chance, share: float = 1.0) -> Pieces:
    """A token is chosen, any as likely as another, and the piece begins with it; what stood before it comes last."""
    body, first, size = _body(pieces, marks)
    words = uniform(chance.words(pieces.numbers, np.full_like(pieces.lengths, 2), "turn")).reshape(-1, 2)  # [B, 2]
    turn = np.where(words[:, 0] < share, (words[:, 1] * size).astype(np.int64), 0)
    taken = np.arange(len(pieces.ids))
    rows = pieces.rows[body]
    taken[body] = first[rows] + (taken[body] - first[rows] + turn[rows]) % size[rows]
    return pieces._replace(ids=pieces.ids[taken])


def delete(pieces: Pieces, marks: Marks, chance: Chance, rate: float) -> Pieces:
    """A share of the tokens is gone without a trace; a piece keeps one at least."""
    marks.check(pieces.ids)
    rows, text = pieces.rows, ~marks.special[pieces.ids]
    words = chance.words(pieces.numbers, 1 + pieces.lengths, "gone")
    firsts = pieces.starts + np.arange(len(pieces.lengths))  # of each piece's words
    keys = np.delete(words, firsts)
    wanted = np.minimum(rate * np.bincount(rows[text], minlength=len(pieces.lengths)), pieces.lengths - 1)
    kept = ~text
    kept[text] = ~drawn(keys[text], np.ones(text.sum(), np.int64), rows[text], wanted, uniform(words[firsts]))
    return pieces._replace(ids=pieces.ids[kept], lengths=np.bincount(rows[kept], minlength=len(pieces.lengths)))


def infill(pieces: Pieces, marks: Marks, chance: Chance, rate: float = 0.3, mean: float = 3.0) -> Pieces:
    """Spans of Poisson length are drawn until a share of the tokens lies in them, and each becomes one mask token.

    Spans never overlap: they are put at random between the tokens that stay. One that would take the share over its
    limit is kept with the probability that makes the expected share just `rate`.
    """
    runs, sizes, text = _runs(pieces, marks)  # each token's run; [R], [R]
    wanted = np.where(text, rate * sizes, 0.0)
    tries = np.where(text, np.ceil(2 * wanted / mean).astype(np.int64) + 32, 0)  # draws that suffice, and to spare
    row = pieces.rows[np.cumsum(sizes) - 1]  # each run's piece

    def of_pieces(counts: Ints) -> Ints:
        return np.bincount(row, weights=counts, minlength=len(pieces.lengths)).astype(np.int64)

    words = chance.words(pieces.numbers, 2 * of_pieces(1 + tries), "fill").reshape(-1, 2)  # [R + tries.sum(), 2]
    firsts = np.cumsum(1 + tries) - 1 - tries
    luck, words = uniform(words[firsts, 0]), np.delete(words, firsts, axis=0)
    run = np.repeat(np.arange(len(sizes)), tries)  # each span's
    spans = poisson(uniform(words[:, 0]), mean)
    ahead = before(spans, run)
    spans = np.clip(sizes[run] - ahead, 0, spans)  # none is longer than what is left
    used = ahead + luck[run] * spans < wanted[run]
    run, spans = run[used], spans[used]
    spans = spans[np.lexsort((words[used, 1], run))]  # the last one drawn tends to be long, and may lie anywhere

    count = np.bincount(run, minlength=len(sizes))
    slots = sizes - np.bincount(run, weights=spans, minlength=len(sizes)).astype(np.int64) + count
    keys = chance.words(pieces.numbers, of_pieces(slots), "slot")
    run = np.repeat(np.arange(len(sizes)), slots)  # now each slot's: a slot is a span or a token that stays
    is_span = drawn(keys, np.ones_like(run), run, count)
    covered = np.ones_like(run)
    covered[is_span] = spans
    first = np.minimum(np.cumsum(covered) - covered, len(runs) - 1)
    # a vocabulary without a mask may have sentinels, the first of which then stands for every span
    filler = marks.sentinels[0] if marks.mask is None and marks.sentinels else _mask(marks)
    ids = np.where(is_span, filler, pieces.ids[first])
    return pieces._replace(ids=ids, lengths=of_pieces(slots))


def _runs(pieces: Pieces, marks: Marks) -> tuple[Ints, Ints, Bools]:
    """Stretches of text, and special tokens one by one: each token's stretch [T], their sizes, which are text [R]."""
    marks.check(pieces.ids)
    text = ~marks.special[pieces.ids]
    begins = ~text | ~np.roll(text, 1)
    begins[pieces.starts] = True
    runs = np.cumsum(begins) - 1
    return runs, np.bincount(runs), text[begins]


def _body(pieces: Pieces, marks: Marks) -> tuple[Bools, Ints, Ints]:
    """What lies between the special tokens at a piece's ends: which tokens [T], its first place and its size [B]."""
    marks.check(pieces.ids)
    place, text = np.arange(len(pieces.ids)), ~marks.special[pieces.ids]
    first = np.minimum.reduceat(np.where(text, place, len(place)), pieces.starts)
    last = np.maximum.reduceat(np.where(text, place, -1), pieces.starts)
    body = (place >= first[pieces.rows]) & (place <= last[pieces.rows])
    return body, first, np.maximum(last - first + 1, 0)


def _mask(marks: Marks) -> int:
    if marks.mask is None:
        kinds = "train the tokeniser for bert, roberta or bart, which have one (qkv tokenizer train --family)"
        raise InputError(f"text.tokenizer: this vocabulary has no mask token; {kinds}")
    return marks.mask
