"""Pieces: no token is lost, none is longer than allowed, and batches depend on seed, epoch and number alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.data.batching import DataPosition
from qkv.data.corpora.chunks import (
    ChunkBatch,
    ChunkBatches,
    ChunkedDocuments,
    ChunkSource,
    PackedDocuments,
    chunk_documents,
)
from qkv.data.corpora.corpus import Document
from qkv.data.corpora.nsp import NextSentencePairs
from qkv.data.corpora.streaming import StreamingBatches
from qkv.data.corpora.tokenized_corpus import TokenBlock, TokenizedCorpus
from qkv.data.template_batch import apply_template, build_template_ids
from qkv.errors import InputError
from qkv.families import bert, roberta
from qkv.tokenization.tokenizer import train_tokenizer

SEPARATOR = 60_000
# Documents as the lengths of their sentences.
DOCUMENTS = st.lists(st.lists(st.integers(1, 12), max_size=8), min_size=1, max_size=30)


def corpus(documents: list[list[int]], parts: int = 1) -> TokenizedCorpus:
    """Every token is its own place, so that none can be mistaken for another."""
    lengths = np.array([sum(sentences) for sentences in documents])
    sentences = np.cumsum([length for document in documents for length in document], dtype=np.int64)
    whole = TokenBlock(np.arange(lengths.sum(), dtype=np.uint16), np.cumsum(lengths), sentences)
    borders = np.linspace(0, len(documents), parts + 1).astype(int).tolist()
    return TokenizedCorpus([whole.slice_documents(low, high) for low, high in pairwise(borders)])


def varied(count: int, seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(1, 12, draw.integers(0, 12)).tolist() for _ in range(count)]


def rows(batch: ChunkBatch) -> list[list[int]]:
    return [part.tolist() for part in np.split(batch.chunks.ids, np.cumsum(batch.chunks.lengths)[:-1])]


# Cutting


@given(DOCUMENTS, st.integers(1, 40), st.sampled_from(["even", "greedy", "sentences"]))
def test_pieces_are_all_tokens_in_order_and_none_is_too_long(documents: list[list[int]], longest: int, at: str) -> None:
    found = corpus(documents)
    cuts = chunk_documents(found.lengths, longest, strategy=at, sentence_ends=found.sentence_ends)
    assert ((cuts.lengths >= 1) & (cuts.lengths <= longest)).all()
    tiled = [(d, t) for d, b, e in zip(cuts.document, cuts.start, cuts.end, strict=True) for t in range(b, e)]
    assert tiled == [(d, t) for d, length in enumerate(found.lengths) for t in range(length)]
    fitting = np.flatnonzero((found.lengths > 0) & (found.lengths <= longest))
    assert (np.bincount(cuts.document, minlength=len(documents))[fitting] == 1).all()


@given(st.lists(st.integers(0, 200), min_size=1), st.integers(1, 40))
def test_even_pieces_are_as_few_as_will_do_and_differ_by_one_token(lengths: list[int], longest: int) -> None:
    cuts = chunk_documents(np.array(lengths), longest)
    for number, length in enumerate(lengths):
        sizes = cuts.lengths[cuts.document == number]
        assert len(sizes) == -(-length // longest)
        assert len(sizes) == 0 or np.ptp(sizes) <= 1


def test_pieces_may_all_but_the_last_have_the_full_length() -> None:
    assert chunk_documents(np.array([7, 0, 3]), 3, strategy="greedy").lengths.tolist() == [3, 3, 1, 3]


def test_pieces_may_end_with_sentences() -> None:
    found = corpus([[4, 4, 4], [], [3, 10, 1], [5]])
    cuts = chunk_documents(found.lengths, 9, strategy="sentences", sentence_ends=found.sentence_ends)
    # the sentence of ten is longer than nine, and cut into halves
    assert list(zip(cuts.document, cuts.lengths, strict=True)) == [(0, 8), (0, 4), (2, 8), (2, 6), (3, 5)]


def test_an_impossible_cut_is_refused() -> None:
    lengths = np.array([3])
    with pytest.raises(InputError, match="max_length is 0"):
        chunk_documents(lengths, 0)
    with pytest.raises(InputError, match="strategy 'odd' is unknown"):
        chunk_documents(lengths, 2, strategy="odd")
    with pytest.raises(InputError, match="needs sentence_ends"):
        chunk_documents(lengths, 2, strategy="sentences")
    with pytest.raises(InputError, match="the sentences have 4 tokens and the documents 3"):
        chunk_documents(lengths, 2, strategy="sentences", sentence_ends=np.array([4]))


@pytest.mark.parametrize("at", ["even", "greedy", "sentences"])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_piece_holds_the_tokens_of_its_document(at: str, parts: int) -> None:
    found = corpus(varied(40), parts)
    source = ChunkedDocuments(found, 10, strategy=at)
    order = np.random.default_rng(0).permutation(len(source.chunks))
    for number, row in zip(order, rows(source.gather(0, order)), strict=True):
        document = found.document(int(source.chunks.document[number]))
        assert row == document[source.chunks.start[number] : source.chunks.end[number]].tolist()


# Packing


@given(DOCUMENTS, st.integers(1, 50), st.integers(0, 3), st.integers(1, 3))
def test_packed_pieces_are_all_documents_each_with_its_separator(
    documents: list[list[int]], longest: int, epoch: int, parts: int
) -> None:
    found = corpus(documents, parts)
    source = PackedDocuments(found, longest, SEPARATOR, seed=4)
    lengths = source.lengths(epoch)
    assert (lengths[:-1] == longest).all()
    batch = source.gather(epoch, np.arange(len(lengths)))
    assert batch.chunks.lengths.tolist() == lengths.tolist()
    *texts, rest = "".join(chr(token) for token in batch.chunks.ids).split(chr(SEPARATOR))
    assert rest == ""
    expected = ["".join(map(chr, found.document(number))) for number in range(len(found))]
    assert sorted(texts) == sorted(expected)


def test_packed_documents_come_in_another_order_in_another_epoch() -> None:
    source = PackedDocuments(corpus(varied(40)), 10, SEPARATOR, seed=4)
    numbers = np.arange(len(source.lengths(0)))
    first, again, second = (source.gather(epoch, numbers).chunks.ids.tolist() for epoch in (0, 0, 1))
    assert first == again != second
    assert rows(source.gather(1, numbers[[5, 2]])) == [second[50:60], second[20:30]]


# Batches

SOURCES: dict[str, Callable[[TokenizedCorpus], ChunkSource]] = {
    "cut": lambda found: ChunkedDocuments(found, 16),
    "sentences": lambda found: ChunkedDocuments(found, 16, strategy="sentences"),
    "packed": lambda found: PackedDocuments(found, 16, SEPARATOR, seed=3),
    "pairs": lambda found: NextSentencePairs(found, 16, seed=3),
}


def run(name: str, workers: int, place: DataPosition, count: int) -> list[tuple[object, ...]]:
    source = SOURCES[name](corpus(varied(50), 3))
    batches = ChunkBatches(source, 60, seed=3, num_workers=workers)
    found = islice(batches.iterate_from(place.epoch, place.batch_index), count)
    return [
        (after, batch.epoch, *map(str, (*batch.chunks, batch.first_lengths, batch.is_next))) for after, batch in found
    ]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_resuming_at_any_place_gives_the_same_tail(name: str, workers: int) -> None:
    source = SOURCES[name](corpus(varied(50), 3))
    count = 2 * ChunkBatches(source, 60, seed=3).batches_per_epoch(0) + 3
    whole = run(name, 0, DataPosition(0, 0), count)
    for done in range(0, count, 5):
        place = whole[done - 1][0] if done else DataPosition(0, 0)
        assert isinstance(place, DataPosition)
        assert run(name, workers, place, count - done) == whole[done:]


@pytest.mark.parametrize("name", SOURCES)
def test_an_epoch_holds_every_piece_once_within_the_budget(name: str) -> None:
    source = SOURCES[name](corpus(varied(50)))
    batches = ChunkBatches(source, 60, seed=3)
    for epoch in (0, 1):
        found = [batch for _, batch in islice(batches.iterate_from(epoch, 0), batches.batches_per_epoch(epoch))]
        numbers = np.concatenate([batch.chunks.indices for batch in found])
        assert sorted(numbers.tolist()) == list(range(len(source.lengths(epoch))))
        assert {batch.epoch for batch in found} == {epoch}
        assert all(len(batch.chunks.ids) == batch.tokens == batch.chunks.lengths.sum() <= 60 for batch in found)


def test_no_token_of_the_corpus_is_missing_from_an_epoch() -> None:
    found = corpus(varied(50), 3)
    batches = ChunkBatches(ChunkedDocuments(found, 16), 60, seed=3, num_workers=2)
    seen = np.concatenate(
        [batch.chunks.ids for _, batch in islice(batches.iterate_from(2, 0), batches.batches_per_epoch(2))]
    )
    assert sorted(seen.tolist()) == list(range(found.tokens))


def test_a_budget_below_a_piece_and_an_empty_corpus_are_refused() -> None:
    with pytest.raises(InputError, match=r"16 tokens, but a batch only 15; set train.batch_tokens to 16"):
        ChunkBatches(ChunkedDocuments(corpus(varied(5)), 16), 15, seed=0)
    with pytest.raises(InputError, match="no chunks"):
        ChunkBatches(ChunkedDocuments(corpus([[], []]), 16), 16, seed=0).batches_per_epoch(0)


@pytest.mark.parametrize("name", SOURCES)
def test_the_parts_of_a_batch_add_up_to_it(name: str) -> None:
    source = SOURCES[name](corpus(varied(50)))
    batch = source.gather(1, np.arange(9))
    for parts in (1, 2, 4, 20):
        found = batch.split(parts)
        assert len(found) == min(parts, 9)
        assert [row for part in found for row in rows(part)] == rows(batch)
        assert np.concatenate([part.chunks.indices for part in found]).tolist() == list(range(9))
        if batch.is_next is not None:
            assert np.concatenate([part.is_next for part in found]).tolist() == batch.is_next.tolist()
            assert np.concatenate([part.first_lengths for part in found]).tolist() == batch.first_lengths.tolist()
    with pytest.raises(InputError, match="0 micro-batches"):
        batch.split(0)


# Next-sentence pairs


def pairs_of(source: NextSentencePairs, epoch: int) -> list[tuple[list[int], list[int], bool]]:
    batch = source.gather(epoch, np.arange(len(source.lengths(epoch))))
    cut_rows = zip(rows(batch), batch.first_lengths.tolist(), batch.is_next.tolist(), strict=True)
    return [(row[:first], row[first:], follows) for row, first, follows in cut_rows]


@given(DOCUMENTS, st.integers(2, 40), st.integers(0, 3))
def test_a_second_segment_follows_the_first_or_is_of_another_document(
    documents: list[list[int]], longest: int, epoch: int
) -> None:
    found = corpus([*documents, [3], [2, 4]], 2)
    ends = np.cumsum(found.lengths)
    source = NextSentencePairs(found, longest, seed=5)
    sentences = {0, *found.sentence_ends.tolist()}
    pieces = chunk_documents(found.lengths, longest, strategy="sentences", sentence_ends=found.sentence_ends)
    assert len(source.lengths(epoch)) == len(pieces)
    for (first, second, follows), length in zip(pairs_of(source, epoch), source.lengths(epoch), strict=True):
        assert first
        assert second
        assert len(first) + len(second) == length <= longest
        for segment in (first, second):
            assert segment == list(range(segment[0], segment[-1] + 1))
        same = np.searchsorted(ends, first[0], side="right") == np.searchsorted(ends, second[0], side="right")
        assert follows == same
        assert not follows or second[0] == first[-1] + 1
        assert longest < 12 or follows or second[0] in sentences  # a random one begins with a sentence


def test_half_of_the_pairs_follow_and_they_change_with_the_epoch() -> None:
    source = NextSentencePairs(corpus([document for document in varied(2500) if sum(document) > 1]), 20, seed=5)
    first, again, second = (pairs_of(source, epoch) for epoch in (0, 0, 1))
    assert first == again != second
    count = len(first)
    for epoch in (first, second):
        share = np.mean([follows for *_, follows in epoch])
        assert abs(share - 0.5) < 4 * 0.5 / np.sqrt(count)
    changed = np.mean([one[2] != other[2] for one, other in zip(first, second, strict=True)])
    assert abs(changed - 0.5) < 4 * 0.5 / np.sqrt(count)


def test_the_length_hardly_tells_whether_a_segment_follows() -> None:
    source = NextSentencePairs(corpus([document for document in varied(4000) if sum(document) > 1]), 64, seed=5)
    found = pairs_of(source, 0)
    lengths = {which: [len(second) for _, second, follows in found if follows == which] for which in (True, False)}
    assert abs(np.mean(lengths[True]) / np.mean(lengths[False]) - 1) < 0.05
    totals = {
        which: [len(first) + len(second) for first, second, follows in found if follows == which]
        for which in (True, False)
    }
    assert abs(np.mean(totals[True]) / np.mean(totals[False]) - 1) < 0.05


def test_a_pair_depends_on_its_number_alone() -> None:
    source = NextSentencePairs(corpus(varied(60)), 16, seed=5)
    whole = source.gather(2, np.arange(20))
    some = source.gather(2, np.array([17, 3]))
    assert rows(some) == [rows(whole)[17], rows(whole)[3]]
    assert some.is_next.tolist() == whole.is_next[[17, 3]].tolist()


def test_pairs_need_two_documents_and_two_tokens() -> None:
    with pytest.raises(InputError, match="two documents"):
        NextSentencePairs(corpus([[3, 4], []]), 16, seed=0)
    with pytest.raises(InputError, match="max_length of 2 or more, not 1"):
        NextSentencePairs(corpus([[3], [4]]), 1, seed=0)


def test_orders_and_pairs_stay_the_same_from_release_to_release() -> None:
    found = corpus([[3, 2], [], [4], [1, 5, 2], [2]])
    packed, pairs = PackedDocuments(found, 6, 99, seed=7), NextSentencePairs(found, 6, seed=7)
    assert packed.gather(3, np.arange(4)).chunks.ids.tolist() == [
        *(9, 10, 11, 12, 13, 14, 15, 16, 99, 0, 1, 2, 3, 4, 99, 5, 6, 7, 8, 99, 99, 17, 18, 99)
    ]
    assert pairs_of(pairs, 3) == [
        ([0, 1, 2], [9], False),
        ([5, 6, 7], [8], True),
        ([9], [17, 18], False),
        ([15], [0, 1, 2], False),
        ([17], [18], True),
    ]


# Frames

LINES = ["the cat sat on the mat.", "A dog ran!", "Who saw it? Nobody, I think."] * 3


@pytest.mark.parametrize("family", [bert, roberta])
def test_framed_pieces_are_what_the_tokeniser_frames(family: object) -> None:
    template = family.TOKENIZER_TEMPLATE  # type: ignore[attr-defined]
    tokeniser = train_tokenizer(template.kind, LINES, vocab_size=300, template=template)
    texts = [tokeniser.encode(line) for line in LINES[:3]]
    found = TokenizedCorpus(
        [TokenBlock(np.concatenate(texts).astype(np.uint16), *(np.cumsum([*map(len, texts)]),) * 2)]
    )
    batch = ChunkedDocuments(found, 100).gather(0, np.array([2, 0, 1]))
    expected = [tokeniser.encode_plus(LINES[number]) for number in (2, 0, 1)]
    pieces, segments = apply_template(batch, build_template_ids(tokeniser))
    assert rows(ChunkBatch(0, pieces)) == [frame.ids for frame in expected]
    assert segments.tolist() == [segment for frame in expected for segment in frame.token_type_ids]
    assert build_template_ids(tokeniser).num_added_tokens == len(expected[0].ids) - len(texts[2])


@pytest.mark.parametrize("family", [bert, roberta])
def test_framed_pairs_are_what_the_tokeniser_frames(family: object) -> None:
    template = family.TOKENIZER_TEMPLATE  # type: ignore[attr-defined]
    tokeniser = train_tokenizer(template.kind, LINES, vocab_size=300, template=template)
    texts = [tokeniser.encode(line) for line in LINES[:2]]
    whole = tokeniser.encode_plus(LINES[0], LINES[1])
    joined = np.concatenate(texts)
    document = TokenBlock(joined.astype(np.uint16), np.array([len(joined)]), np.array([len(joined)]))
    batch = ChunkedDocuments(TokenizedCorpus([document]), 99).gather(0, np.array([0, 0]))
    pairs = ChunkBatch(0, batch.chunks, np.array([len(texts[0])] * 2), np.array([True, False]))
    pieces, segments = apply_template(pairs, build_template_ids(tokeniser, pairs=True))
    assert pieces.ids.tolist() == whole.ids * 2
    assert segments.tolist() == whole.token_type_ids * 2


# Streaming


def documents(count: int) -> list[Document]:
    return [
        Document(" ".join(["cat"] * (1 + number * 7 % 30)) + f" {number}.", f"here:{number}") for number in range(count)
    ]


def streamed(workers: int, place: DataPosition, count: int) -> list[tuple[object, ...]]:
    tokeniser = train_tokenizer("character", ["cat 0123456789."])
    stream = StreamingBatches(
        documents(50), tokeniser, 20, max_tokens=90, seed=3, shuffle_window=20, num_workers=workers
    )
    found = islice(stream.iterate_from(place.epoch, place.batch_index), count)
    return [(after, batch.epoch, *map(str, batch.chunks)) for after, batch in found]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_stream_entered_at_any_place_gives_the_same_tail(workers: int) -> None:
    whole = streamed(0, DataPosition(0, 0), 200)
    assert whole[-1][1] > 3  # over the end of the corpus
    for done in range(0, 200, 23):
        place = whole[done - 1][0] if done else DataPosition(0, 0)
        assert isinstance(place, DataPosition)
        assert streamed(workers, place, 200 - done) == whole[done:]


def test_a_pass_of_a_stream_holds_every_token() -> None:
    tokeniser = train_tokenizer("character", ["cat 0123456789."])
    stream = StreamingBatches(documents(50), tokeniser, 20, max_tokens=90, seed=3, shuffle_window=20)
    seen = np.zeros(tokeniser.vocab_size, dtype=np.int64)
    for after, batch in stream.iterate_from(0, 0):
        seen += np.bincount(batch.chunks.ids, minlength=len(seen))
        if after == DataPosition(3, 0):  # windows of 20, 20 and 10 documents
            break
    expected = [number for document in documents(50) for number in tokeniser.encode(document.text)]
    assert seen.tolist() == np.bincount(expected, minlength=len(seen)).tolist()


def test_a_stream_of_nothing_and_places_that_do_not_exist_are_refused() -> None:
    tokeniser = train_tokenizer("character", ["cat"])
    with pytest.raises(InputError, match="no text"):
        next(StreamingBatches([], tokeniser, 20, max_tokens=90, seed=3).iterate_from(0, 0))
    with pytest.raises(InputError, match="give a Corpus or a list"):
        StreamingBatches(iter(documents(1)), tokeniser, 20, max_tokens=90, seed=3)
    with pytest.raises(InputError, match=r"set train.batch_tokens to 20"):
        StreamingBatches(documents(1), tokeniser, 20, max_tokens=19, seed=3)
    stream = StreamingBatches(documents(5), tokeniser, 20, max_tokens=90, seed=3)
    with pytest.raises(InputError, match="batch 999 of window 0 does not exist"):
        next(stream.iterate_from(0, 999))
    with pytest.raises(InputError, match="batch 0 of window -1 does not exist"):
        stream.iterate_from(-1, 0)
