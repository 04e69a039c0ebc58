"""Packed pieces of bare text as their tokeniser's template writes them: [CLS] a [SEP] b [SEP], <s> a </s>, a </s>."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qkv.data.chance import Ints, Pieces
from qkv.data.pieces import PieceBatch
from qkv.text.tokeniser import Tokeniser


class Frame(NamedTuple):
    """What stands before, between and behind one or two texts: ids and their segments, and the texts' own segments."""

    ids: tuple[list[int], list[int], list[int]]
    segments: tuple[list[int], list[int], list[int]]
    texts: tuple[int, int]

    @property
    def size(self) -> int:
        """Tokens that it adds to a piece: a model's length less this is the longest piece."""
        return sum(map(len, self.ids))


def frame_of(tokeniser: Tokeniser, *, pairs: bool = False) -> Frame:
    """The tokeniser's own template, of one text or of two."""
    found = tokeniser.frame("a", "a" if pairs else None)
    first = found.parts.index(0)
    second = found.parts.index(1) if pairs else len(found.ids) - found.parts[::-1].index(0)
    last = len(found.ids) - found.parts[::-1].index(1 if pairs else 0)
    middle = second - found.parts[second - 1 :: -1].index(0)  # behind the first text
    cuts = (slice(0, first), slice(middle, second), slice(last, None))
    ids, segments = (tuple(values[cut] for cut in cuts) for values in (found.ids, found.segments))
    return Frame(ids, segments, (found.segments[first], found.segments[last - 1]))  # type: ignore[arg-type]


def framed(batch: PieceBatch, frame: Frame) -> tuple[Pieces, Ints]:
    """The pieces, or pairs, in a frame, and each token's segment [T]."""
    ids, lengths, numbers = batch.pieces
    starts = np.cumsum(lengths) - lengths
    border = starts + (lengths if batch.first is None else batch.first)
    # At the border of two pieces the rows keep what belongs to the first ahead of what belongs to the second.
    places = np.repeat(np.stack([starts, border, starts + lengths], 1), [*map(len, frame.ids)], axis=1)  # [B, added]
    texts = np.asarray(frame.texts)[(np.arange(len(ids)) >= np.repeat(border, lengths)).astype(np.int64)]  # [T]

    def put(values: Ints, added: tuple[list[int], ...]) -> Ints:
        row = np.concatenate(added).astype(np.int64)
        return np.insert(values, places.ravel(), np.tile(row, len(lengths)))

    return Pieces(put(ids, frame.ids), lengths + frame.size, numbers), put(texts, frame.segments)
