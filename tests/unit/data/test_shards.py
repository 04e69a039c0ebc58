"""Shards: the tokeniser's own ids, the same bytes from any number of workers and after any kill."""

from __future__ import annotations

import itertools
import json
import pickle
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, normalizers, trainers

from qkv.data.corpora import shards, tokenized_corpus
from qkv.data.corpora.corpus import Corpus, Document
from qkv.data.corpora.shards import META, Shards, build_shards
from qkv.data.corpora.tokenized_corpus import TokenBlock, TokenizedCorpus, concat, encode, tokenizer_fingerprint
from qkv.errors import InputError
from qkv.tokenization.tokenizer import SPECIAL_TOKENS, Tokenizer, train_tokenizer

WORDS = "the cat sat on a mat and Dr. Who saw 12 naïve dogs near St. Ives".split()  # noqa: SIM905


def corpus(count: int = 60, seed: int = 0) -> list[Document]:
    """Documents of one to nine sentences, some in lines, some in paragraphs; one has no token at all."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        sentences = [
            " ".join(draw.choices(WORDS, k=draw.randint(1, 9))) + draw.choice(".?!") for _ in range(draw.randint(1, 9))
        ]
        by_line = number % 3 == 0
        text = ("\n" if by_line else draw.choice([" ", "\n\n"])).join(sentences)
        made.append(Document(text, f"doc:{number}", by_line))
    return made


@cache
def tokeniser(kind: str = "wordpiece") -> Tokenizer:
    size = None if kind in ("character", "whitespace") else 300
    return train_tokenizer(kind, [document.text for document in corpus()], vocab_size=size)


@cache
def across_spaces() -> Tokenizer:
    """Merges that reach over white space, and a space before every text, as Llama has it."""
    tokenizer = HFTokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    texts = (document.text for document in corpus())
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, special_tokens=[*SPECIAL_TOKENS], show_progress=False)
    )
    return Tokenizer(tokenizer)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tokenized_corpus, "_GROUP_CHARACTERS", 300
    )  # characters, so that workers have something to share


# Encoding


@pytest.mark.parametrize("kind", ["character", "whitespace", "bpe", "wordpiece", "byte_bpe", "word_bpe", "unigram"])
def test_a_document_has_the_ids_of_its_text_and_its_sentences_are_all_of_it(kind: str) -> None:
    cut, made = tokeniser(kind), corpus()
    found = encode(made, cut)
    assert len(found) == len(made)
    for number, document in enumerate(made):
        assert found.document(number).tolist() == cut.encode(document.text)
        expected = [cut.encode(sentence) for sentence in document.sentences]
        assert [sentence.tolist() for sentence in found.sentences(number)] == expected


def test_a_tokeniser_that_reads_over_white_space_gives_the_ids_of_the_whole_text() -> None:
    cut, made = across_spaces(), corpus()
    found = encode(made, cut)
    apart = 0
    for number, document in enumerate(made):
        assert found.document(number).tolist() == cut.encode(document.text)
        sentences = found.sentences(number)
        assert np.concatenate(sentences).tolist() == found.document(number).tolist()
        apart += [i for s in document.sentences for i in cut.encode(s)] != cut.encode(document.text)
        assert len(sentences) <= len(document.sentences)
    assert apart


def test_a_document_without_tokens_keeps_its_number() -> None:
    found = encode([Document("a cat", "1"), Document("\x00\x01", "2"), Document("a. \x00. B", "3")], tokeniser())
    assert found.lengths.tolist() == [2, 0, len(tokeniser().encode("a. . B"))]
    assert found.sentences(1) == []
    assert len(found.document(1)) == 0
    assert all(len(sentence) for number in range(3) for sentence in found.sentences(number))


def test_ids_take_two_bytes_where_the_vocabulary_allows() -> None:
    class Wide(Tokenizer):
        vocab_size = 2**16 + 1

    assert encode(corpus(3), tokeniser()).document(0).dtype == np.uint16
    assert encode(corpus(3), Wide(tokeniser().backend)).document(0).dtype == np.uint32


def test_places_are_counted_over_all_parts() -> None:
    whole = encode(corpus(), tokeniser())
    part = concat(whole._blocks)
    cuts = [0, 7, 8, 30, len(whole)]
    apart = TokenizedCorpus([part.slice_documents(low, high) for low, high in itertools.pairwise(cuts)])
    flat = np.concatenate([whole.document(number) for number in range(len(whole))])
    for found in (whole, apart):
        assert found.tokens == len(flat)
        assert found.tokens_at(np.arange(len(flat))[::-1]).tolist() == flat[::-1].tolist()
        assert found.gather_spans(np.array([3, 0, 5]), np.array([len(flat), 2, 5])).tolist() == [*flat[3:], *flat[:2]]
        assert (found.sentence_ends == whole.sentence_ends).all()
        assert (found.document_starts == whole.document_starts).all()
        assert (
            found.document(30).tolist()
            == flat[found.document_starts[30] : found.document_starts[30] + found.lengths[30]].tolist()
        )
        with pytest.raises(IndexError):
            found.document(len(whole))
    assert concat(apart._blocks).fingerprint() == part.fingerprint()


def test_nothing_cannot_be_encoded() -> None:
    with pytest.raises(InputError, match="no documents"):
        encode([], tokeniser())


# Building


def test_shards_hold_what_memory_holds(tmp_path: Path) -> None:
    held, mapped = encode(corpus(), tokeniser()), build_shards(tmp_path / "c", corpus(), tokeniser(), shard_tokens=100)
    assert len(mapped.meta["shards"]) > 5
    assert mapped.meta["tokens"] == held.tokens == mapped.tokens
    assert mapped.lengths.tolist() == held.lengths.tolist()
    assert mapped.sentence_ends.tolist() == held.sentence_ends.tolist()
    for number in range(len(held)):
        assert mapped.document(number).tolist() == held.document(number).tolist()
        assert [s.tolist() for s in mapped.sentences(number)] == [s.tolist() for s in held.sentences(number)]
    assert not mapped.document(0).flags.owndata
    assert not mapped.document(0).flags.writeable


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_gives_the_same_bytes(tmp_path: Path, workers: int) -> None:
    build_shards(tmp_path / "alone", corpus(), tokeniser(), shard_tokens=100)
    build_shards(tmp_path / "many", corpus(), tokeniser(), num_workers=workers, shard_tokens=100)
    assert content(tmp_path / "alone") == content(tmp_path / "many")


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 9), min_size=1), st.integers(1, 40), st.lists(st.integers(1, 5), min_size=1))
def test_a_shard_ends_with_the_document_that_fills_it_however_documents_come(
    lengths: list[int], size: int, groups: list[int]
) -> None:
    ends = np.cumsum(lengths)
    whole = TokenBlock(np.arange(ends[-1], dtype=np.uint16), ends, ends[np.array(lengths) > 0])
    borders = sorted({0, *np.minimum(np.cumsum(groups), len(lengths)).tolist(), len(lengths)})
    parts = [whole.slice_documents(low, high) for low, high in itertools.pairwise(borders)]
    found = list(shards._split_into_shards(parts, size))
    assert concat(found).fingerprint() == whole.fingerprint()
    assert all(len(part.ids) >= size for part in found[:-1])
    for part in found:
        last = len(part.document_ends) - 1
        assert last == 0 or int(part.document_ends[last - 1]) < size


class Killed(BaseException):
    pass


def stopped_after(documents: list[Document], count: int) -> Iterator[Document]:
    yield from documents[:count]
    raise Killed


@pytest.mark.parametrize("workers", [0, 3])
def test_a_killed_build_goes_on_after_its_last_whole_shard(tmp_path: Path, workers: int) -> None:
    build_shards(tmp_path / "whole", corpus(), tokeniser(), shard_tokens=100)
    encoded_before = []
    for kill in (1, 20, 41, 60):
        with pytest.raises(Killed):
            build_shards(
                tmp_path / "cut", stopped_after(corpus(), kill), tokeniser(), num_workers=workers, shard_tokens=100
            )
        encoded_before.append(len(list((tmp_path / "cut").glob("*.safetensors"))))
        (tmp_path / "cut" / ".00009.safetensors.part").write_bytes(b"half a shard, left by a kill")
        with pytest.raises(InputError, match="is not finished; give the same"):
            Shards(tmp_path / "cut")
    assert encoded_before == sorted(encoded_before)
    assert 1 < encoded_before[2] < encoded_before[3]
    first: list[tuple[int, int]] = []
    build_shards(
        tmp_path / "cut",
        corpus(),
        tokeniser(),
        num_workers=1,
        shard_tokens=100,
        on_progress=lambda *counts: first.append(counts),
    )
    (tmp_path / "cut" / ".00009.safetensors.part").unlink(missing_ok=True)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert first[0][0] > 20  # documents that were not encoded again
    assert first[-1] == (60, Shards(tmp_path / "whole").tokens)


def test_a_kill_while_a_shard_is_written_leaves_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_shards(tmp_path / "whole", corpus(), tokeniser(), shard_tokens=100)
    write = shards.atomic_write_bytes
    calls: list[Path] = []

    def failing(path: Path, data: bytes) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise Killed
        write(path, data)

    monkeypatch.setattr(shards, "atomic_write_bytes", failing)
    with pytest.raises(Killed):
        build_shards(tmp_path / "cut", corpus(), tokeniser(), shard_tokens=100)
    build_shards(tmp_path / "cut", corpus(), tokeniser(), shard_tokens=100)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_a_finished_build_is_not_done_again(tmp_path: Path) -> None:
    first = build_shards(tmp_path / "c", corpus(), tokeniser())
    again = build_shards(tmp_path / "c", stopped_after([], 0), tokeniser())
    assert first.fingerprint() == again.fingerprint()


def test_another_build_is_refused_and_a_failed_one_leaves_its_folder_free(tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"fine\n\xff\n")
    with pytest.raises(InputError, match=r"bad.txt:2: byte 1 of the line, 0xFF, is not UTF-8"):
        build_shards(tmp_path / "c", Corpus([bad], format="line_per_document"), tokeniser())
    bad.write_bytes(b"fine\nnow\n")
    assert (
        build_shards(tmp_path / "c", Corpus([bad], format="line_per_document"), tokeniser()).meta["files"][0]["size"]
        == 9
    )
    bad.write_bytes(b"fine\nnow too\n")
    with pytest.raises(InputError, match="with another 'files'"):
        build_shards(tmp_path / "c", Corpus([bad], format="line_per_document"), tokeniser())
    with pytest.raises(InputError, match="with another 'files'"):
        build_shards(tmp_path / "c", corpus(), tokeniser())
    bad.write_bytes(b"fine\nnow\n")
    with pytest.raises(InputError, match="with another 'shard_tokens'"):
        build_shards(tmp_path / "c", Corpus([bad], format="line_per_document"), tokeniser(), shard_tokens=7)
    with pytest.raises(InputError, match="is not a corpus"):
        build_shards(tmp_path, corpus(), tokeniser())


def test_what_a_kill_left_of_the_very_first_file_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".meta.json.part").write_text("{")
    assert build_shards(tmp_path / "c", corpus(), tokeniser()).tokens


def test_fewer_documents_than_before_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        build_shards(tmp_path / "c", stopped_after(corpus(), 40), tokeniser(), shard_tokens=100)
    with pytest.raises(InputError, match="now has 5"):
        build_shards(tmp_path / "c", corpus(5), tokeniser(), shard_tokens=100)


def test_an_empty_corpus_and_an_impossible_shard_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no text"):
        build_shards(tmp_path / "c", [], tokeniser())
    with pytest.raises(InputError, match="no text"):
        build_shards(tmp_path / "c", [Document("\x00", "1")], tokeniser())
    with pytest.raises(InputError, match="shard_tokens is 0"):
        build_shards(tmp_path / "c", corpus(), tokeniser(), shard_tokens=0)


# Opening


def test_another_tokeniser_is_refused(tmp_path: Path) -> None:
    build_shards(tmp_path / "c", corpus(), tokeniser())
    assert Shards(tmp_path / "c", tokeniser()).tokens
    with pytest.raises(InputError, match="another tokenizer"):
        Shards(tmp_path / "c", tokeniser("bpe"))


def test_a_tokeniser_is_known_by_what_it_does(tmp_path: Path) -> None:
    cut = tokeniser()
    cut.save(tmp_path / "tokenizer.json")
    assert tokenizer_fingerprint(Tokenizer.load(tmp_path / "tokenizer.json")) == tokenizer_fingerprint(cut)
    lower = json.loads((tmp_path / "tokenizer.json").read_text())
    lower["normalizer"]["lowercase"] = not lower["normalizer"]["lowercase"]
    (tmp_path / "lower.json").write_text(json.dumps(lower))
    assert tokenizer_fingerprint(Tokenizer.load(tmp_path / "lower.json")) != tokenizer_fingerprint(cut)


def test_the_digest_tells_texts_apart(tmp_path: Path) -> None:
    made = corpus()
    one, same, other = (
        build_shards(tmp_path / str(number), documents, tokeniser(), shard_tokens=100).fingerprint()
        for number, documents in enumerate((made, corpus(), [*made[:-1], Document("a cat", "x")]))
    )
    assert one == same != other


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def header(path: Path) -> None:
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def garbled(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[20] ^= 1
    path.write_bytes(whole)


@pytest.mark.parametrize("damage", [cut_short, empty, header, garbled, Path.unlink])
def test_a_damaged_shard_is_refused_by_name(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    build_shards(tmp_path / "c", corpus(), tokeniser(), shard_tokens=100)
    damage(tmp_path / "c" / "00001.safetensors")
    with pytest.raises(InputError, match=r"00001\.safetensors: (damaged|is missing)[^\n]*$"):
        Shards(tmp_path / "c")


def test_a_shard_of_another_build_is_refused(tmp_path: Path) -> None:
    for seed in (0, 1):
        build_shards(tmp_path / str(seed), corpus(seed=seed), tokeniser(), shard_tokens=100)
    (tmp_path / "0" / "00001.safetensors").write_bytes((tmp_path / "1" / "00001.safetensors").read_bytes())
    with pytest.raises(InputError, match="of another build"):
        Shards(tmp_path / "0")


def test_every_byte_is_read_when_asked_for(tmp_path: Path) -> None:
    build_shards(tmp_path / "c", corpus(), tokeniser())
    path = tmp_path / "c" / "00000.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-3] ^= 1
    path.write_bytes(whole)
    assert Shards(tmp_path / "c").tokens
    with pytest.raises(InputError, match="damaged"):
        Shards(tmp_path / "c", check=True)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"version": 99}'])
def test_a_damaged_index_is_one_line(tmp_path: Path, text: str) -> None:
    build_shards(tmp_path / "c", corpus(), tokeniser())
    (tmp_path / "c" / META).write_text(text)
    with pytest.raises(InputError, match=r"meta\.json: (damaged|has version 99)"):
        Shards(tmp_path / "c")


def test_a_folder_that_is_no_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a built corpus"):
        Shards(tmp_path)


def test_a_copy_in_another_process_maps_the_files_again(tmp_path: Path) -> None:
    found = build_shards(tmp_path / "c", corpus(), tokeniser(), shard_tokens=100)
    copy = pickle.loads(pickle.dumps(found))
    assert len(pickle.dumps(found)) < 1000
    assert copy.document(33).tolist() == found.document(33).tolist()
