"""Training batches from documents that are tokenized while they are read, without building a corpus first.

Documents are read in windows of a few thousand, each of which is encoded, chunked and batched like a small corpus. The
`epoch` of a `DataPosition` is the index of the window, counted over all passes through the corpus. Resuming reads the
documents of earlier windows, but does not encode them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from qkv.data.batching import BUCKET_POOL, DataPosition, Ints, next_position, plan_epoch
from qkv.data.corpora.chunks import ChunkBatch, ChunkedDocuments, ChunkSource
from qkv.data.corpora.corpus import Document
from qkv.data.corpora.tokenized_corpus import TokenizedCorpus, make_block_encoder
from qkv.data.prefetch import prefetch_map
from qkv.errors import InputError
from qkv.tokenization.tokenizer import Tokenizer

SHUFFLE_WINDOW = 4096  # documents


class StreamingBatches:
    """Infinite, resumable iterator over batches of a corpus that can be iterated repeatedly, such as `Corpus`.

    The order is random within a window; windows are in the order of the corpus, whose files should not be sorted by
    topic. `make_source` makes chunks of at most `max_length` tokens of a window; by default `ChunkedDocuments`.
    """

    def __init__(
        self,
        documents: Iterable[Document],
        tokenizer: Tokenizer,
        max_length: int,
        *,
        max_tokens: int | None,
        seed: int,
        make_source: Callable[[TokenizedCorpus], ChunkSource] | None = None,
        shuffle_window: int = SHUFFLE_WINDOW,
        num_workers: int = 0,
        bucket_pool: int = BUCKET_POOL,
        max_examples: int | None = None,
    ) -> None:
        if isinstance(documents, Iterator):
            raise InputError(
                "streaming iterates over the documents more than once; give a Corpus or a list, not an iterator"
            )
        if max_tokens is not None and max_length > max_tokens:
            reason = f"a chunk can have {max_length} tokens, but a batch only {max_tokens}"
            raise InputError(f"{reason}; set train.batch_tokens to {max_length} or more, or use shorter chunks")
        if shuffle_window < 1:
            raise InputError(f"shuffle_window is {shuffle_window}; use 1 or more")
        self._documents, self._encode = documents, make_block_encoder(tokenizer)
        self._make_source = make_source or partial(ChunkedDocuments, max_length=max_length)
        self._shuffle_window, self._num_workers = shuffle_window, num_workers
        self._max_tokens, self._max_examples, self._seed = max_tokens, max_examples, seed
        self._bucket_pool = bucket_pool

    def iterate_from(self, epoch: int, batch_index: int) -> Iterator[tuple[DataPosition, ChunkBatch]]:
        """Yield the batches from `batch_index` of window `epoch` on, each with the position after it."""
        if epoch < 0 or batch_index < 0:
            raise InputError(f"batch {batch_index} of window {epoch} does not exist; count from 0")
        return self._iterate(epoch, batch_index)

    def _iterate(self, epoch: int, batch_index: int) -> Iterator[tuple[DataPosition, ChunkBatch]]:
        windows = itertools.islice(self._iter_windows(), epoch, None)
        planned_windows = prefetch_map(self._plan_window, enumerate(windows, epoch), self._num_workers, "stream")
        for window_number, source, plan in planned_windows:
            first_index = batch_index if window_number == epoch else 0
            if first_index > len(plan):
                reason = f"batch {batch_index} of window {epoch} does not exist (the window has {len(plan)})"
                raise InputError(f"{reason}; resume with the data and settings of the checkpoint")
            for current_index in range(first_index, len(plan)):
                position = next_position(window_number, current_index, len(plan))
                yield position, source.gather(window_number, plan[current_index])

    def _plan_window(self, numbered_window: tuple[int, list[Document]]) -> tuple[int, ChunkSource, list[Ints]]:
        window_number, documents = numbered_window
        source = self._make_source(TokenizedCorpus([self._encode(documents)]))
        lengths = source.lengths(window_number)
        if not len(lengths):
            return window_number, source, []
        plan = plan_epoch(
            lengths,
            lengths * 0,
            max_tokens=self._max_tokens,
            max_examples=self._max_examples,
            seed=self._seed,
            epoch=window_number,
            bucket_pool=self._bucket_pool,
        )
        return window_number, source, plan

    def _iter_windows(self) -> Iterator[list[Document]]:
        while True:
            documents = iter(self._documents)
            has_documents = False
            while window := list(itertools.islice(documents, self._shuffle_window)):
                has_documents = True
                yield window
            if not has_documents:
                raise InputError("the corpus has no text; give at least one document")
