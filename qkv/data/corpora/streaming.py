"""Batches out of documents as they are read, with nothing built: for a corpus that is read once, or is too large.

Documents are taken by windows of some thousands, which are encoded, cut and planned as a small corpus is. A place's
epoch is the number of the window, counted over all passes through the corpus, so that to enter at a place documents are
read over, but not encoded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from qkv.data.batching import BUCKET_POOL, DataPosition, Ints, plan_epoch
from qkv.data.corpora.chunks import ChunkBatch, ChunkedDocuments, ChunkSource
from qkv.data.corpora.corpus import Document
from qkv.data.corpora.tokenized_corpus import TokenizedCorpus, make_block_encoder
from qkv.data.prefetch import prefetch_map
from qkv.errors import InputError
from qkv.tokenization.tokenizer import Tokenizer

SHUFFLE_WINDOW = 4096  # documents


class StreamingBatches:
    """The endless run of batches of a corpus that can be iterated again and again, such as `Corpus`.

    Within a window the order is random; over windows it is the corpus's, so the files should not be sorted by subject.
    `make_source` says how a window becomes pieces of at most `max_length` tokens; by default each document is cut evenly.
    """

    def __init__(
        self,
        documents: Iterable[Document],
        tokenizer: Tokenizer,
        max_length: int,
        *,
        max_tokens: int,
        seed: int,
        make_source: Callable[[TokenizedCorpus], ChunkSource] | None = None,
        shuffle_window: int = SHUFFLE_WINDOW,
        num_workers: int = 0,
        bucket_pool: int = BUCKET_POOL,
    ) -> None:
        if isinstance(documents, Iterator):
            raise InputError("a stream goes through its documents more than once; give a Corpus or a list")
        if max_length > max_tokens:
            reason = f"a piece may have {max_length} tokens and a batch {max_tokens}"
            raise InputError(f"{reason}; set train.batch_tokens to {max_length} or more, or cut shorter pieces")
        if shuffle_window < 1:
            raise InputError(f"windows of {shuffle_window} documents cannot be; use 1 or more")
        self._documents, self._encode = documents, make_block_encoder(tokenizer)
        self._make_source = make_source or partial(ChunkedDocuments, max_length=max_length)
        self._shuffle_window, self._num_workers = shuffle_window, num_workers
        self._max_tokens, self._seed, self._bucket_pool = max_tokens, seed, bucket_pool

    def iterate_from(self, epoch: int, batch_index: int) -> Iterator[tuple[DataPosition, ChunkBatch]]:
        """Batches from number `batch_index` of window `epoch` on, each with the place after it: enter there to go on."""
        if epoch < 0 or batch_index < 0:
            raise InputError(f"batch {batch_index} of window {epoch} does not exist; count from 0")
        return self._iterate(epoch, batch_index)

    def _iterate(self, epoch: int, batch_index: int) -> Iterator[tuple[DataPosition, ChunkBatch]]:
        windows = itertools.islice(self._iter_windows(), epoch, None)
        planned_windows = prefetch_map(self._plan_window, enumerate(windows, epoch), self._num_workers, "stream")
        for window_number, source, plan in planned_windows:
            first_index = batch_index if window_number == epoch else 0
            if first_index > len(plan):
                reason = f"batch {batch_index} of window {epoch} does not exist (the window makes {len(plan)})"
                raise InputError(f"{reason}; resume with the data and settings that the checkpoint was made with")
            for current_index in range(first_index, len(plan)):
                next_position = DataPosition(window_number, current_index + 1) if current_index + 1 < len(plan) else DataPosition(window_number + 1, 0)
                yield next_position, source.gather(window_number, plan[current_index])

    def _plan_window(self, numbered_window: tuple[int, list[Document]]) -> tuple[int, ChunkSource, list[Ints]]:
        window_number, documents = numbered_window
        source = self._make_source(TokenizedCorpus([self._encode(documents)]))
        lengths = source.lengths(window_number)
        if not len(lengths):
            return window_number, source, []
        plan_options = {"max_tokens": self._max_tokens, "seed": self._seed, "epoch": window_number, "bucket_pool": self._bucket_pool}
        return window_number, source, plan_epoch(lengths, lengths * 0, **plan_options)

    def _iter_windows(self) -> Iterator[list[Document]]:
        while True:
            documents = iter(self._documents)
            has_documents = False
            while window := list(itertools.islice(documents, self._shuffle_window)):
                has_documents = True
                yield window
            if not has_documents:
                raise InputError("the corpus has no text to stream; give some")
