"""Files of word vectors: word2vec's text and binary formats, and GloVe's text, all of them also compressed.

word2vec's formats begin with a line `number of words, width`; GloVe's has no such line. Files are read as a stream, so
that a part of their words fits into memory where all would not.
"""

from __future__ import annotations

import contextlib
import gzip
import re
import zlib
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from qkv.data.compression import limited_lines, open_decompressed
from qkv.errors import InputError, quote
from qkv.files import atomic_write, open_file
from qkv.limits import limit, raise_hint

Vectors = npt.NDArray[np.float32]

SUFFIXES = (".bin", ".txt", ".vec", ".glove")  # each of them also with .gz
_HEADER = re.compile(rb"\s*(\d{1,18})[ \t]+(\d{1,18})\s*")
_NUMERIC = re.compile(rb"[-+0-9.eE \tnaifNAIF\r]*")
_MAX_WORD_BYTES = 10_000
_SNIFFED_BYTES = 1024


@dataclass(frozen=True)
class WordVector:
    """One row of a file."""

    word: str
    vector: Vectors  # [width]


def is_vector_file(name: str | Path) -> bool:
    """Return whether a name is that of a file of word vectors, by its suffix."""
    return Path(str(name).removesuffix(".gz")).suffix in SUFFIXES


def read_vectors(path: str | Path, words: Collection[str] | None = None) -> tuple[list[str], Vectors]:
    """Return the words of a file and their vectors [N, width]; with `words`, only those that are among them."""
    rows = list(iter_vectors(path, words))
    if not rows and words is None:
        raise InputError(f"{path}: has no word vectors; give a file in the format of word2vec or GloVe")
    matrix = np.stack([row.vector for row in rows]) if rows else np.zeros((0, 0), np.float32)
    return [row.word for row in rows], matrix


def iter_vectors(path: str | Path, words: Collection[str] | None = None) -> Generator[WordVector, None, None]:
    """Yield the rows of a file; with `words`, only those of words that are among them.

    A word that occurs twice, a value that is not finite, a row of another width, and a file that ends early or has
    another number of words than its first line announces are refused.
    """
    name = str(path)
    with open_file(path) as file:
        try:
            yield from _Reader(open_decompressed(file, name), name, words)
        except (EOFError, gzip.BadGzipFile, zlib.error):
            raise InputError(f"{name}: the compressed file is damaged or not complete; copy it again") from None


def vector_width(path: str | Path) -> int:
    """Return the width of the vectors of a file, by its first row."""
    with contextlib.closing(iter_vectors(path)) as rows:
        first = next(rows, None)
    if first is None:
        raise InputError(f"{path}: has no word vectors; give a file in the format of word2vec or GloVe")
    return len(first.vector)


class _Reader:
    """Iterates over the rows of an open file."""

    def __init__(self, stream: BinaryIO, name: str, words: Collection[str] | None) -> None:
        self._stream, self._name, self._words = stream, name, words
        self._seen: set[bytes] = set()

    def __iter__(self) -> Iterator[WordVector]:
        first_line = self._stream.readline(limit("line_bytes") + 1)
        if len(first_line) > limit("line_bytes"):
            raise InputError(f"{self._name}:1: the line has too many bytes; {raise_hint('line_bytes')}")
        header = _HEADER.fullmatch(first_line)
        if header is None:
            if not first_line.strip():
                raise InputError(f"{self._name}:1: is empty; expected a word and its vector, or two numbers")
            yield from self._text_rows(None, None, first_line)
            return
        count, width = int(header[1]), int(header[2])
        if count > limit("vocabulary"):
            raise InputError(f"{self._name}:1: announces {count:,} words; {raise_hint('vocabulary')}")
        if not 1 <= width <= limit("dimension"):
            raise InputError(f"{self._name}:1: announces vectors of {width:,} numbers; {raise_hint('dimension')}")
        yield from self._text_rows(count, width, b"") if self._is_text() else self._binary_rows(count, width)

    def _is_text(self) -> bool:
        """Return whether the rows are text: numbers follow the first word."""
        peek: Any = self._stream  # files, gzip and zstd readers can all peek
        _, space, rest = bytes(peek.peek(_SNIFFED_BYTES)[:_SNIFFED_BYTES]).lstrip(b"\n").partition(b" ")
        if not space:
            return ".bin" not in Path(self._name).suffixes
        return _NUMERIC.fullmatch(rest.partition(b"\n")[0]) is not None

    def _text_rows(self, count: int | None, width: int | None, first_line: bytes) -> Iterator[WordVector]:
        number, num_rows = 1 - bool(first_line), 0
        lines = limited_lines(self._stream, self._name)
        while line := first_line or next(lines, b""):
            first_line, number = b"", number + 1
            if not line.strip():
                continue
            num_rows += 1
            location = f"{self._name}:{number}"
            fields = line.rstrip().split(b" ") if width is None else line.rstrip().rsplit(b" ", width)
            width = len(fields) - 1 if width is None else width
            self._check_width(fields, width, line, location)
            word = self._new_word(fields[0], num_rows, location)
            if word is not None:
                yield WordVector(word, self._parse_numbers(fields[1:], word, location))
        if count is not None and num_rows != count:
            reason = f"its first line announces {count:,} words, and it has {num_rows:,}"
            raise InputError(f"{self._name}: {reason}; copy the file again, or correct that line")

    def _binary_rows(self, count: int, width: int) -> Iterator[WordVector]:
        for number in range(1, count + 1):
            location = f"{self._name}: word {number:,} of {count:,}"
            word = self._new_word(self._read_binary_word(location), number, location)
            content = self._stream.read(4 * width)
            if len(content) < 4 * width:
                raise InputError(f"{location}: the file ends in its vector; copy the file again")
            if word is not None:
                vector = np.frombuffer(content, "<f4").astype(np.float32)
                _check_finite(vector, word, location)
                yield WordVector(word, vector)
        if self._stream.read(2).strip():
            raise InputError(f"{self._name}: goes on after the {count:,} words that its first line announces")

    def _read_binary_word(self, location: str) -> bytes:
        word = bytearray()
        while (byte := self._stream.read(1)) != b" ":
            if not byte:
                raise InputError(f"{location}: the file ends before it; copy the file again")
            word += byte
            if len(word) > _MAX_WORD_BYTES:
                raise InputError(f"{location}: has more than {_MAX_WORD_BYTES:,} bytes; is this a word2vec file?")
        return bytes(word).lstrip(b"\n")

    def _new_word(self, raw: bytes, number: int, location: str) -> str | None:
        """Return a word, or None if it is not among the words to read."""
        if number > limit("vocabulary"):
            raise InputError(f"{location}: too many words; {raise_hint('vocabulary')}")
        try:
            word = raw.decode()
        except UnicodeDecodeError:
            raise InputError(f"{location}: the word is not UTF-8 text; convert the file") from None
        if not word:
            raise InputError(f"{location}: the word is empty; expected a word and its vector")
        if raw in self._seen:
            raise InputError(f"{location}: {quote(word)} occurs for the second time; remove one of them")
        self._seen.add(raw)
        return word if self._words is None or word in self._words else None

    @staticmethod
    def _check_width(fields: Sequence[bytes], width: int, line: bytes, location: str) -> None:
        if not 1 <= width <= limit("dimension"):
            raise InputError(f"{location}: expected a word and its vector, not {quote(line[:60].decode('latin-1'))}")
        # a row that is too long has a number at the end of its word
        last_of_word = fields[0].rpartition(b" ")[2] if b" " in fields[0] else b""
        if len(fields) != width + 1 or (last_of_word and _is_number(last_of_word)):
            num_numbers = len(line.split()) - 1
            raise InputError(f"{location}: the vector has {num_numbers} numbers, and those before it {width}")

    @staticmethod
    def _parse_numbers(fields: Sequence[bytes], word: str, location: str) -> Vectors:
        try:
            vector = np.array(fields, dtype=np.float32)
        except ValueError:
            wrong = next(field for field in fields if not _is_number(field))
            raise InputError(f"{location}: {quote(wrong.decode('latin-1'))} is not a number") from None
        _check_finite(vector, word, location)
        return vector


def _is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def _check_finite(vector: Vectors, word: str, location: str) -> None:
    if not np.isfinite(vector).all():
        raise InputError(f"{location}: the vector of {quote(word)} has a value that is not finite; correct the file")


def write_vectors(path: str | Path, words: Sequence[str], vectors: Vectors) -> None:
    """Write word vectors [N, width] in the format that the name implies.

    `.bin` is word2vec's binary format, `.txt` and `.vec` its text format, `.glove` GloVe's; `.gz` after it compresses.
    """
    target = Path(path)
    suffix = Path(target.name.removesuffix(".gz")).suffix
    if suffix not in SUFFIXES:
        raise InputError(f"{target}: should end in {', '.join(SUFFIXES)}, or one of them with .gz")
    invalid = next((word for word in words if not word or any(char.isspace() for char in word)), None)
    if invalid is not None:
        raise InputError(
            f"{target}: the word {quote(invalid)} is empty or has white space, which these files cannot hold"
        )
    if len(set(words)) < len(words):
        raise InputError(f"{target}: a word occurs twice; give each word once")

    def write(tmp_path: Path) -> None:
        with open(tmp_path, "wb") as file, contextlib.ExitStack() as stack:
            stream: BinaryIO = file
            if target.suffix == ".gz":
                compressed = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))
                stream = cast(BinaryIO, compressed)
            if suffix != ".glove":
                stream.write(b"%d %d\n" % vectors.shape)
            for word, vector in zip(words, np.asarray(vectors, "<f4"), strict=True):
                stream.write(word.encode() + b" ")
                # nine digits identify a float32
                text = " ".join(f"{value:.9g}" for value in vector.tolist()).encode() if suffix != ".bin" else b""
                stream.write(text + b"\n" if text else vector.tobytes() + b"\n")

    atomic_write(target, write)
