"""SentencePiece's files and answers (Kudo and Richardson, 2018), read from their bytes.

Both are Protocol Buffers; the few fields that matter here are read without that library, so that a T5 vocabulary needs
neither it nor sentencepiece. Field numbers: sentencepiece_model.proto and sentencepiece.proto of SentencePiece 0.2.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from qkv.errors import InputError

UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


class Piece(NamedTuple):
    text: str
    score: float
    kind: int


class Model(NamedTuple):
    """A SentencePiece model: its pieces in the order of their ids, and how text is normalised before them."""

    pieces: list[Piece]
    kind: int
    charsmap: bytes


class Span(NamedTuple):
    """One piece of an encoded text; the span counts characters of that text."""

    piece: str
    first: int
    last: int


def read_model(content: bytes, where: str) -> Model:
    pieces: list[Piece] = []
    kind, charsmap = UNIGRAM, b""
    seen = set()
    try:
        for number, value in _fields(content):
            seen.add(number)
            if number == 1:
                pieces.append(_piece(_bytes(value)))
            elif number == 2:
                kind = next((int(v) for n, v in _fields(_bytes(value)) if n == 3 and isinstance(v, int)), kind)
            elif number == 3:
                charsmap = next((_bytes(v) for n, v in _fields(_bytes(value)) if n == 2), charsmap)
    except (ValueError, struct.error):
        raise InputError(f"{where}: damaged or not a SentencePiece model; copy it again") from None
    # The settings come after the pieces: a file that was cut between two pieces has none.
    if not {1, 2, 3} <= seen:
        raise InputError(f"{where}: not a whole SentencePiece model; copy it again")
    return Model(pieces, kind, charsmap)


def read_spans(content: bytes, text: str) -> list[Span]:
    """What sentencepiece's `encode_as_serialized_proto` says of `text`; it counts bytes, people count characters."""
    pieces = [dict(_fields(_bytes(value))) for number, value in _fields(content) if number == 2]
    character = [0]
    for place, letter in enumerate(text):
        character.extend([place] * (len(letter.encode()) - 1))
        character.append(place + 1)
    return [
        Span(_bytes(piece[1]).decode(), character[_int(piece.get(4, 0))], character[_int(piece.get(5, 0))])
        for piece in pieces
    ]


def _piece(content: bytes) -> Piece:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(content):
        if number == 1:
            text = _bytes(value).decode()
        elif number == 2:
            score = struct.unpack("<f", _bytes(value))[0]
        elif number == 3:
            kind = _int(value)
    return Piece(text, score, kind)


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of one message, as Protocol Buffers' encoding guide lays them out."""
    place = 0
    while place < len(content):
        key, place = _varint(content, place)
        if key & 7 == 0:
            value, place = _varint(content, place)
            yield key >> 3, value
            continue
        if key & 7 == 2:
            size, place = _varint(content, place)
        else:
            size = {1: 8, 5: 4}.get(key & 7, -1)
        if size < 0 or place + size > len(content):
            raise ValueError("not a message")
        yield key >> 3, content[place : place + size]
        place += size


def _varint(content: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(content):
        byte = content[place]
        value |= (byte & 0x7F) << shift
        shift += 7
        place += 1
        if byte < 0x80:
            return value, place
    raise ValueError("not a message")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return value
    raise ValueError("not a message")


def _int(value: int | bytes) -> int:
    if isinstance(value, int):
        return value
    raise ValueError("not a message")
