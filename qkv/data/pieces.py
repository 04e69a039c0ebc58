"""Documents cut to a model's length with no token lost, and batches of the pieces.

`CutDocuments` keeps documents apart: a piece is (a part of) one document, so that attention never crosses a border.
`PackedDocuments` joins them end to end and cuts every `longest` tokens, as for GPT-2: attention crosses borders.
Lengths count the tokens of the text; a model's [CLS] and [SEP] are the caller's, who asks for as many fewer.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from qkv.data.batches import POOL, Endless, even_edges
from qkv.data.chance import Bools, Chance, Ints, Pieces
from qkv.data.encoded import Encoded, each
from qkv.errors import InputError

WAYS = ("even", "longest", "sentences")


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """Pieces of documents, in the documents' order; together they are all tokens, each once."""

    document: Ints  # [N]
    begin: Ints  # [N] tokens of its document before it
    end: Ints  # [N]

    def __len__(self) -> int:
        return len(self.document)

    @property
    def lengths(self) -> Ints:
        return self.end - self.begin


def cut(lengths: Ints, longest: int, *, at: str = "even", sentence_ends: Ints | None = None) -> Cuts:
    """Cuts documents of `lengths` tokens into pieces of at most `longest`; one that fits stays whole.

    A longer one is cut into as few pieces as will do:
    - even: all of nearly the same length, so that none is a scrap of a few tokens;
    - longest: all but the last one of `longest` tokens;
    - sentences: before the sentence that no longer fits, given where each one ends when all documents stand end to end
      (`Encoded.sentence_ends`); a sentence over `longest` is first cut as in `even`. This may take more pieces.
    """
    if longest < 1:
        raise InputError(f"pieces of at most {longest} tokens cannot be; use 1 or more")
    if at not in WAYS:
        raise InputError(f"pieces are cut at {', '.join(WAYS)}, not '{at}'")
    sizes = np.asarray(lengths, dtype=np.int64)
    if at == "sentences":
        if sentence_ends is None:
            raise InputError("pieces that end with a sentence need sentence_ends")
        return _at_sentences(sizes, longest, sentence_ends)
    count = -(-sizes // longest)
    document, number = each(count)
    if at == "longest":
        begin = number * longest
        return Cuts(document, begin, np.minimum(begin + longest, sizes[document]))
    begin, end = (sizes[document] * (number + step) // count[document] for step in (0, 1))
    return Cuts(document, begin, end)


def unit_edges(sentence_ends: Ints, longest: int) -> Ints:
    """Where units begin and end [units + 1]: sentences, or nearly even parts of one that is over `longest`."""
    sizes = np.diff(sentence_ends, prepend=0)
    parts = cut(sizes, longest)
    return np.concatenate([np.zeros(1, np.int64), (sentence_ends - sizes)[parts.document] + parts.end])


def _at_sentences(sizes: Ints, longest: int, sentence_ends: Ints) -> Cuts:
    edges = unit_edges(sentence_ends, longest)
    stops = np.cumsum(sizes)
    starts = stops - sizes
    if edges[-1] != sizes.sum():
        raise InputError(f"sentences of {edges[-1]} tokens in documents of {sizes.sum()}; give those of one corpus")
    ends = [stops[(sizes > 0) & (sizes <= longest)]]
    for number in np.flatnonzero(sizes > longest).tolist():
        low, high = np.searchsorted(edges, (starts[number], stops[number]))
        ends.append(np.array(_greedy(edges[low : high + 1].tolist(), longest)))
    end = np.sort(np.concatenate(ends))
    begin = np.concatenate([np.zeros(min(1, len(end)), np.int64), end[:-1]])  # the pieces leave nothing between them
    document = np.searchsorted(stops, begin, side="right")
    return Cuts(document, begin - starts[document], end - starts[document])


def _greedy(places: list[int], longest: int) -> list[int]:
    """Of rising places, each at most `longest` behind the one before: the fewest stops on the way to the last one."""
    found: list[int] = []
    at = 0
    while at + 1 < len(places):
        at = bisect.bisect_right(places, places[at] + longest) - 1
        found.append(places[at])
    return found


@dataclass(frozen=True, slots=True, eq=False)
class PieceBatch:
    """Packed pieces, with the epoch that, beside seed and number, decides what is done to them.

    Where a piece is a pair, `first` is the length of its first segment and `follows` says whether the second one really
    follows it.
    """

    epoch: int
    pieces: Pieces
    first: Ints | None = None  # [B]
    follows: Bools | None = None  # [B]

    def __len__(self) -> int:
        return len(self.pieces.lengths)

    @property
    def tokens(self) -> int:
        return len(self.pieces.ids)

    def split(self, parts: int) -> list[PieceBatch]:
        """Cut into at most `parts` consecutive batches of about equal token count, each of at least one piece."""
        if parts < 1:
            raise InputError(f"a batch cannot be split into {parts} parts; use 1 or more")
        ends = np.cumsum(self.pieces.lengths)
        edges = even_edges(ends.tolist(), min(parts, len(self)))
        tokens = [int(ends[edge - 1]) if edge else 0 for edge in edges]
        return [self._between(*edges[n : n + 2], *tokens[n : n + 2]) for n in range(len(edges) - 1)]

    def _between(self, low: int, high: int, begin: int, end: int) -> PieceBatch:
        ids, lengths, numbers = self.pieces
        pieces = Pieces(ids[begin:end], lengths[low:high], numbers[low:high])
        first = None if self.first is None else self.first[low:high]
        return PieceBatch(self.epoch, pieces, first, None if self.follows is None else self.follows[low:high])


class Source(Protocol):
    """Numbered pieces of a corpus; which they are may change from epoch to epoch. Any number of threads may use one."""

    longest: int

    def lengths(self, epoch: int) -> Ints:
        """Tokens of each piece [pieces]."""
        ...

    def take(self, epoch: int, numbers: Ints) -> PieceBatch:
        """The chosen pieces, in that order."""
        ...


class CutDocuments:
    """Each document by itself, cut where it is too long; the same pieces in every epoch."""

    def __init__(self, corpus: Encoded, longest: int, *, at: str = "even") -> None:
        self.corpus, self.longest = corpus, longest
        ends = corpus.sentence_ends if at == "sentences" else None
        self.cuts = cut(corpus.lengths, longest, at=at, sentence_ends=ends)
        self._starts = corpus.starts

    def lengths(self, epoch: int) -> Ints:  # noqa: ARG002  # the same in every epoch
        return self.cuts.lengths

    def take(self, epoch: int, numbers: Ints) -> PieceBatch:
        starts = self._starts[self.cuts.document[numbers]]
        begins, ends = starts + self.cuts.begin[numbers], starts + self.cuts.end[numbers]
        return PieceBatch(epoch, Pieces(self.corpus.gather(begins, ends), ends - begins, numbers))


class PackedDocuments:
    """All documents end to end, in an order that seed and epoch decide, each with `separator` behind it, cut every
    `longest` tokens; the last piece of an epoch is what is left."""

    def __init__(self, corpus: Encoded, longest: int, separator: int, *, seed: int) -> None:
        if longest < 1:
            raise InputError(f"pieces of at most {longest} tokens cannot be; use 1 or more")
        self.corpus, self.longest, self.separator, self.seed = corpus, longest, separator, seed
        self._starts = corpus.starts
        self._total = corpus.tokens + len(corpus)
        self._laid = lru_cache(2)(self._lay)  # two: batches are made ahead of time, over the end of an epoch

    def _lay(self, epoch: int) -> tuple[Ints, Ints]:
        """The documents in order, and where each one's separator stands."""
        one, count = np.zeros(1, np.int64), np.array([len(self.corpus)])
        order = np.argsort(Chance(self.seed, epoch).words(one, count, "pack"), kind="stable")
        return order, np.cumsum(self.corpus.lengths[order] + 1) - 1

    def lengths(self, epoch: int) -> Ints:  # noqa: ARG002
        return cut(np.array([self._total]), self.longest, at="longest").lengths

    def take(self, epoch: int, numbers: Ints) -> PieceBatch:
        order, separators = self._laid(epoch)
        begins = numbers * self.longest
        lengths = np.minimum(begins + self.longest, self._total) - begins
        piece, offset = each(lengths)
        place = begins[piece] + offset  # [T] among all documents with their separators
        at = np.searchsorted(separators, place)
        inside = place < separators[at]
        document = order[at]
        before = place - (separators[at] - self.corpus.lengths[document])  # tokens of its document before it
        ids = np.full(len(place), self.separator, dtype=np.int64)
        ids[inside] = self.corpus.take((self._starts[document] + before)[inside])
        return PieceBatch(epoch, Pieces(ids, lengths, numbers))


class PieceBatches(Endless[PieceBatch]):
    """The endless run of batches of pieces, of at most `budget` tokens each; see `Endless.from_place`.

    Pieces of like length share a batch; `pool=1` mixes all lengths.
    """

    def __init__(self, source: Source, budget: int, seed: int, workers: int = 0, pool: int = POOL) -> None:
        if source.longest > budget:
            said = f"a piece may have {source.longest} tokens and a batch {budget}"
            raise InputError(f"{said}; set train.batch_tokens to {source.longest} or more, or cut shorter pieces")
        super().__init__(budget, seed, workers, pool)
        self._source = source

    def _lengths(self, epoch: int) -> tuple[Ints, Ints]:
        lengths = self._source.lengths(epoch)
        if not len(lengths):
            raise InputError("the corpus has no pieces to make batches of; give more text")
        return lengths, np.zeros_like(lengths)

    def _take(self, epoch: int, indices: Ints) -> PieceBatch:
        return self._source.take(epoch, indices)
