"""Batches out of documents as they are read, with nothing built: for a corpus that is read once, or is too large.

Documents are taken by windows of some thousands, which are encoded, cut and planned as a small corpus is. A place's
epoch is the number of the window, counted over all passes through the corpus, so that to enter at a place documents are
read over, but not encoded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from qkv.data.ahead import ahead
from qkv.data.batches import POOL, Ints, Place, plan_epoch
from qkv.data.corpus import Document
from qkv.data.encoded import Encoded, encoder
from qkv.data.pieces import CutDocuments, PieceBatch, Source
from qkv.errors import InputError
from qkv.text.tokeniser import Tokeniser

WINDOW = 4096  # documents


class Stream:
    """The endless run of batches of a corpus that can be iterated again and again, such as `Corpus`.

    Within a window the order is random; over windows it is the corpus's, so the files should not be sorted by subject.
    `make` says how a window becomes pieces of at most `longest` tokens; by default each document is cut evenly.
    """

    def __init__(
        self,
        documents: Iterable[Document],
        tokeniser: Tokeniser,
        longest: int,
        *,
        budget: int,
        seed: int,
        make: Callable[[Encoded], Source] | None = None,
        window: int = WINDOW,
        workers: int = 0,
        pool: int = POOL,
    ) -> None:
        if isinstance(documents, Iterator):
            raise InputError("a stream goes through its documents more than once; give a Corpus or a list")
        if longest > budget:
            said = f"a piece may have {longest} tokens and a batch {budget}"
            raise InputError(f"{said}; set train.batch_tokens to {longest} or more, or cut shorter pieces")
        if window < 1:
            raise InputError(f"windows of {window} documents cannot be; use 1 or more")
        self._documents, self._encode = documents, encoder(tokeniser)
        self._make = make or partial(CutDocuments, longest=longest)
        self._window, self._workers = window, workers
        self._budget, self._seed, self._pool = budget, seed, pool

    def from_place(self, epoch: int, index: int) -> Iterator[tuple[Place, PieceBatch]]:
        """Batches from number `index` of window `epoch` on, each with the place after it: enter there to go on."""
        if epoch < 0 or index < 0:
            raise InputError(f"batch {index} of window {epoch} does not exist; count from 0")
        return self._batches(epoch, index)

    def _batches(self, epoch: int, index: int) -> Iterator[tuple[Place, PieceBatch]]:
        windows = itertools.islice(self._windows(), epoch, None)
        planned = ahead(self._planned, enumerate(windows, epoch), self._workers, "stream")
        for number, source, plan in planned:
            first = index if number == epoch else 0
            if first > len(plan):
                said = f"batch {index} of window {epoch} does not exist (the window makes {len(plan)})"
                raise InputError(f"{said}; resume with the data and settings that the checkpoint was made with")
            for at in range(first, len(plan)):
                after = Place(number, at + 1) if at + 1 < len(plan) else Place(number + 1, 0)
                yield after, source.take(number, plan[at])

    def _planned(self, numbered: tuple[int, list[Document]]) -> tuple[int, Source, list[Ints]]:
        number, documents = numbered
        source = self._make(Encoded([self._encode(documents)]))
        lengths = source.lengths(number)
        if not len(lengths):
            return number, source, []
        how = {"budget": self._budget, "seed": self._seed, "epoch": number, "pool": self._pool}
        return number, source, plan_epoch(lengths, lengths * 0, **how)

    def _windows(self) -> Iterator[list[Document]]:
        while True:
            reading = iter(self._documents)
            some = False
            while window := list(itertools.islice(reading, self._window)):
                some = True
                yield window
            if not some:
                raise InputError("the corpus has no text to stream; give some")
