"""Parse model files and encodings of SentencePiece (Kudo and Richardson, 2018).

Both are Protocol Buffers. The few fields that are needed are parsed here, so that reading a T5 vocabulary requires
neither protobuf nor sentencepiece. Field numbers: sentencepiece_model.proto and sentencepiece.proto of version 0.2.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

from qkv.errors import InputError

UNIGRAM, BPE = 1, 2
_MAX_VARINT_BITS = 70
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


class Piece(NamedTuple):
    """One entry of a SentencePiece vocabulary."""

    text: str
    score: float
    piece_type: int


class SentencePieceModel(NamedTuple):
    """A SentencePiece model: its pieces in the order of their ids, and its text normalization."""

    pieces: list[Piece]
    model_type: int
    charsmap: bytes


class PieceSpan(NamedTuple):
    """One piece of an encoded text; the span counts characters of that text."""

    piece: str
    start: int
    end: int


def parse_model(content: bytes, location: str) -> SentencePieceModel:
    """Parse a model file; `location` names it in errors."""
    pieces: list[Piece] = []
    model_type, charsmap = UNIGRAM, b""
    field_numbers = set()
    try:
        for field_number, value in _iter_fields(content):
            field_numbers.add(field_number)
            if field_number == 1:
                pieces.append(_parse_piece(_require_bytes(value)))
            elif field_number == 2:
                settings = _iter_fields(_require_bytes(value))
                model_type = next((int(v) for n, v in settings if n == 3 and isinstance(v, int)), model_type)
            elif field_number == 3:
                settings = _iter_fields(_require_bytes(value))
                charsmap = next((_require_bytes(v) for n, v in settings if n == 2), charsmap)
    except (ValueError, struct.error):
        raise InputError(f"{location}: damaged or not a SentencePiece model; copy it again") from None
    # the settings follow the pieces, so that a file truncated between two pieces has none
    if not {1, 2, 3} <= field_numbers:
        raise InputError(f"{location}: not a complete SentencePiece model; copy it again")
    return SentencePieceModel(pieces, model_type, charsmap)


def parse_spans(content: bytes, text: str) -> list[PieceSpan]:
    """Parse the result of sentencepiece's `encode_as_serialized_proto`; byte offsets become character offsets."""
    messages = (_require_bytes(value) for field_number, value in _iter_fields(content) if field_number == 2)
    pieces = [dict(_iter_fields(message)) for message in messages]
    char_offsets = [0]
    for index, char in enumerate(text):
        char_offsets.extend([index] * (len(char.encode()) - 1))
        char_offsets.append(index + 1)
    spans = []
    for piece in pieces:
        start, end = (char_offsets[_require_int(piece.get(field_number, 0))] for field_number in (4, 5))
        spans.append(PieceSpan(_require_bytes(piece[1]).decode(), start, end))
    return spans


def _parse_piece(content: bytes) -> Piece:
    text, score, piece_type = "", 0.0, NORMAL
    for field_number, value in _iter_fields(content):
        if field_number == 1:
            text = _require_bytes(value).decode()
        elif field_number == 2:
            score = struct.unpack("<f", _require_bytes(value))[0]
            if not math.isfinite(score):
                raise ValueError("not a score")
        elif field_number == 3:
            piece_type = _require_int(value)
    return Piece(text, score, piece_type)


def _iter_fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a Protocol Buffers message."""
    offset = 0
    while offset < len(content):
        key, offset = _read_varint(content, offset)
        if key & 7 == 0:
            value, offset = _read_varint(content, offset)
            yield key >> 3, value
            continue
        if key & 7 == 2:
            size, offset = _read_varint(content, offset)
        else:
            size = {1: 8, 5: 4}.get(key & 7, -1)
        if size < 0 or offset + size > len(content):
            raise ValueError("not a message")
        yield key >> 3, content[offset : offset + size]
        offset += size


def _read_varint(content: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while offset < len(content) and shift < _MAX_VARINT_BITS:
        byte = content[offset]
        value |= (byte & 0x7F) << shift
        shift += 7
        offset += 1
        if byte < 0x80:
            return value, offset
    raise ValueError("not a message")


def _require_bytes(value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return value
    raise ValueError("not a message")


def _require_int(value: int | bytes) -> int:
    if isinstance(value, int):
        return value
    raise ValueError("not a message")
