"""Files of word vectors: three formats there and back, and every kind of damage in one line."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from qkv.checkpoints.vector_files import read_vectors, vector_width, write_vectors
from qkv.errors import InputError

WORDS = ["king", "Königin", "10", "naïve-ish", "."]
VECTORS = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)


@pytest.mark.parametrize("name", ["v.bin", "v.txt", "v.vec", "v.glove", "v.bin.gz", "v.txt.gz", "v.glove.gz"])
def test_vectors_come_back_bit_equal(tmp_path: Path, name: str) -> None:
    write_vectors(tmp_path / name, WORDS, VECTORS)
    words, vectors = read_vectors(tmp_path / name)
    assert words == WORDS
    np.testing.assert_array_equal(vectors, VECTORS)
    assert vector_width(tmp_path / name) == 7


def test_only_the_words_that_are_wanted_are_read(tmp_path: Path) -> None:
    write_vectors(tmp_path / "v.bin", WORDS, VECTORS)
    words, vectors = read_vectors(tmp_path / "v.bin", {"10", "king", "queen"})
    assert words == ["king", "10"]
    np.testing.assert_array_equal(vectors, VECTORS[[0, 2]])


def test_a_word_of_glove_may_contain_spaces(tmp_path: Path) -> None:
    (tmp_path / "v.txt").write_text("at 1 2 3\n. . . 4 5 6\n")
    assert read_vectors(tmp_path / "v.txt")[0] == ["at", ". . ."]


def test_a_binary_file_without_line_ends_between_words_is_read(tmp_path: Path) -> None:
    """gensim writes none; word2vec.c writes one after each vector."""
    content = b"".join(word.encode() + b" " + vector.tobytes() for word, vector in zip(WORDS, VECTORS, strict=True))
    (tmp_path / "v.bin").write_bytes(b"5 7\n" + content)
    assert read_vectors(tmp_path / "v.bin")[0] == WORDS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2 2\na 1 2\n", "v.txt: its first line announces 2 words, and it has 1"),
        ("1 2\na 1 2\nb 3 4\n", "v.txt: its first line announces 1 words, and it has 2"),
        ("2 2\na 1 2\na 3 4\n", "v.txt:3: 'a' occurs for the second time"),
        ("2 2\na 1 2\nb 3 nan\n", "v.txt:3: the vector of 'b' has a value that is not finite"),
        ("2 2\na 1 2\nb 3 1e999\n", "v.txt:3: the vector of 'b' has a value that is not finite"),
        ("2 2\na 1 2\nb 3\n", "v.txt:3: the vector has 1 numbers, and those before it 2"),
        ("2 2\na 1 2\nb 3 4 5\n", "v.txt:3: the vector has 3 numbers, and those before it 2"),
        ("a 1 2\nb 3 x\n", "v.txt:2: 'x' is not a number"),
        ("a 1 2\n\nb 3 4 5\n", "v.txt:3: the vector has 3 numbers"),
        ("word\n", "v.txt:1: expected a word and its vector, not 'word"),
        ("", "v.txt:1: is empty"),
        ("99999999999 5\n", "v.txt:1: announces 99,999,999,999 words; the limit is"),
        ("5 99999999999\n", "v.txt:1: announces vectors of 99,999,999,999 numbers; the limit is"),
    ],
)
def test_a_wrong_text_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "v.txt").write_text(text)
    with pytest.raises(InputError) as error:
        read_vectors(tmp_path / "v.txt")
    assert message in str(error.value)


def binary(count: int = 2, width: int = 2) -> bytes:
    return b"%d %d\n" % (count, width) + b"a " + np.ones(2, "<f4").tobytes() + b"\nb " + np.ones(2, "<f4").tobytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (binary()[:-3], "v.bin: word 2 of 2: the file ends in its vector"),
        (binary(count=3), "v.bin: word 3 of 3: the file ends before it"),
        (binary(count=1), "v.bin: goes on after the 1 words that its first line announces"),
        (binary().replace(b"b ", b"a "), "v.bin: word 2 of 2: 'a' occurs for the second time"),
        (binary().replace(b"\nb ", b"\n\xff "), "v.bin: word 2 of 2: the word is not UTF-8"),
        (binary()[:-4] + np.full(1, np.inf, "<f4").tobytes(), "v.bin: word 2 of 2: the vector of 'b' has a value"),
        (b"1 2\n" + b"\x01" * 20_000, "v.bin: word 1 of 1: has more than 10,000 bytes"),
    ],
)
def test_a_wrong_binary_file_is_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "v.bin").write_bytes(content)
    with pytest.raises(InputError) as error:
        read_vectors(tmp_path / "v.bin")
    assert message in str(error.value)


def test_a_truncated_gz_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "v.txt.gz").write_bytes(gzip.compress(b"2 2\n" + b"a 1 2\nb 3 4\n" * 999)[:-20])
    with pytest.raises(InputError, match=r"v\.txt\.gz"):
        read_vectors(tmp_path / "v.txt.gz")


@pytest.mark.parametrize("words", [["a b", "c"], ["", "c"], ["c", "c"]])
def test_words_that_a_file_cannot_hold_are_not_written(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(InputError, match="word"):
        write_vectors(tmp_path / "v.txt", words, VECTORS[:2])
    assert not list(tmp_path.iterdir())
