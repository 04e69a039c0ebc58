"""Marian's tokenisers (Junczys-Dowmunt et al., 2018; OPUS-MT, Tiedemann and Thottingal, 2020), cut by sentencepiece.

Each side has a SentencePiece model that cuts and a vocabulary that numbers the pieces. The two do not agree on what
exists: a piece without a number is unknown, and a number may belong to the other side only. So the library itself cuts,
and its answer is equal to the reference's to the last piece.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qkv.errors import InputError
from qkv.text.engine import Framed, Given
from qkv.text.settings import numbers
from qkv.text.spm import Span, read_model, read_spans

SOURCE, TARGET = "source", "target"
VOCABULARY, TARGET_VOCABULARY = "vocab.json", "target_vocab.json"
SPM = {SOURCE: "source.spm", TARGET: "target.spm"}

# The language to translate into, where a model knows several: the first thing in a source text.
_CODE = re.compile(r">>.*?<<", re.DOTALL)


class Marian:
    """One side of a Marian folder, made from the folder's files; it adds `</s>` at the end and knows no start."""

    def __init__(self, files: Mapping[str, bytes], side: str, names: Mapping[str, str], where: str = "") -> None:
        self._made_from = (files, side, names)
        self.side, self.names = side, names
        name = SPM[side]
        self._spm = _processor(files[name], f"{where}{name}")
        table = TARGET_VOCABULARY if side == TARGET and TARGET_VOCABULARY in files else VOCABULARY
        self._numbers = numbers(files[table], f"{where}{table}")
        self._names = {number: piece for piece, number in self._numbers.items()}
        for role in ("unk", "end"):
            if names.get(role) not in self._numbers:
                raise InputError(f"{where}{table}: has no '{names.get(role)}'; it is not this model's vocabulary")
        self._unk, self._end = self._numbers[names["unk"]], self._numbers[names["end"]]
        self.specials = [name for name in names.values() if name in self._numbers]
        longest_first = sorted(self.specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)))

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Marian, self._made_from

    @property
    def size(self) -> int:
        return len(self._numbers)

    def ids(self, text: str) -> list[int]:
        code, rest = _language(text)
        pieces = self._spm.encode_as_pieces(rest)
        return [self._id(piece) for piece in ([code, *pieces] if code else pieces)]

    def ids_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.ids(text) for text in texts]

    def cut(self, text: Given, pair: Given | None, *, template: bool, special: bool) -> Framed:
        found = Framed([], [], [], [], [])
        for part, given in enumerate((text, pair)):
            if given is not None:
                self._append(found, part, given, special)
        if template:
            for column, value in zip(_columns(found), (self._end, 0, (0, 0), None, None), strict=True):
                column.append(value)
        return found

    def cut_batch(self, inputs: Sequence[str | tuple[str, str]], *, special: bool) -> list[Framed]:
        pairs = [(one, None) if isinstance(one, str) else one for one in inputs]
        return [self.cut(text, pair, template=True, special=special) for text, pair in pairs]

    def text(self, ids: Sequence[int]) -> str:
        names = [self._names.get(number, "") for number in ids]
        text = str(self._spm.decode_pieces([name for name in names if name and name not in self.specials]))
        # A piece that only the other side's model knows keeps its mark.
        return text.replace("▁", " ").strip()

    def label(self, number: int) -> str:
        return self._names.get(number, f"<{number}>").replace("▁", " ")

    def number(self, name: str) -> int | None:
        return self._numbers.get(name)

    def name(self, number: int) -> str | None:
        return self._names.get(number)

    def _append(self, found: Framed, part: int, given: Given, special: bool) -> None:
        texts = [given] if isinstance(given, str) else given
        for place, text in enumerate(texts):
            word = -1
            for span, number in self._spans(text, special):
                word += word < 0 or span.piece.startswith("▁") or span.piece in self.specials
                values = (number, 0, (span.first, span.last), word if isinstance(given, str) else place, part)
                for column, value in zip(_columns(found), values, strict=True):
                    column.append(value)

    def _spans(self, text: str, special: bool) -> Iterator[tuple[Span, int]]:
        place = 0
        for match in self._special.finditer(text) if special else ():
            yield from self._plain(text[place : match.start()], place)
            yield Span(match[0], *match.span()), self._numbers[match[0]]
            place = match.end()
        yield from self._plain(text[place:], place)

    def _plain(self, text: str, place: int) -> Iterator[tuple[Span, int]]:
        code, rest = _language(text)
        if code:
            yield Span(code, place, place + len(code)), self._id(code)
        place += len(text) - len(rest)
        for piece, first, last in read_spans(self._spm.encode_as_serialized_proto(rest), rest):
            # The space before a word is in its first piece, but is not what people would mark in the text.
            first = min(last, first + len(rest[first:last]) - len(rest[first:last].lstrip()))
            yield Span(piece, place + first, place + last), self._id(piece)

    def _id(self, piece: str) -> int:
        # A run of characters that the model does not know is one piece, and could spell a special token.
        return self._unk if piece in self.specials else self._numbers.get(piece, self._unk)


def _columns(found: Framed) -> tuple[list[Any], ...]:
    return found.ids, found.segments, found.offsets, found.words, found.parts


def _language(text: str) -> tuple[str, str]:
    match = _CODE.match(text)
    return (match[0], text[match.end() :]) if match else ("", text)


def _processor(content: bytes, where: str) -> Any:
    read_model(content, where)  # says what is wrong with the file, which the library does not
    try:
        import sentencepiece
    except ImportError:
        raise InputError(f"{where}: needs sentencepiece to be read; pip install 'qkv[sentencepiece]'") from None
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError:
        raise InputError(f"{where}: damaged or not a SentencePiece model; copy it again") from None
