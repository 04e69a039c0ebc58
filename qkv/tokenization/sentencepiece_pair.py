"""Tokenizers of Marian (Junczys-Dowmunt et al., 2018) and OPUS-MT (Tiedemann and Thottingal, 2020).

Each side has a SentencePiece model, which splits a text, and a vocabulary file, which maps pieces to ids. The two do
not contain the same pieces: a piece without an id is unknown, and an id may belong to the other side only. Therefore
the sentencepiece library splits the text here, and the pieces are equal to those of the reference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qkv.errors import InputError, quote
from qkv.tokenization.backend import Encoding, TextInput
from qkv.tokenization.checks import call_quietly, check_charsmap, probe
from qkv.tokenization.sentencepiece_proto import PieceSpan, parse_model, parse_spans
from qkv.tokenization.tokenizer_config import parse_vocab_json

SOURCE, TARGET = "source", "target"
VOCAB_JSON, TARGET_VOCAB_JSON = "vocab.json", "target_vocab.json"
SPM_FILES = {SOURCE: "source.spm", TARGET: "target.spm"}

# The target language of a multilingual model, at the beginning of a source text.
_LANGUAGE_CODE = re.compile(r">>.*?<<", re.DOTALL)


class SentencePieceBackend:
    """The tokenizer of one side, made from the files of a checkpoint folder; it adds EOS and no BOS token."""

    hf_class = "MarianTokenizer"
    rewrites_words = False

    def __init__(
        self, files: Mapping[str, bytes], side: str, role_tokens: Mapping[str, str], location: str = ""
    ) -> None:
        self._init_args = (files, side, role_tokens)
        self.side, self.role_tokens = side, role_tokens
        name = SPM_FILES[side]
        self._spm = _load_sentencepiece(files[name], f"{location}{name}")
        vocab_file = TARGET_VOCAB_JSON if side == TARGET and TARGET_VOCAB_JSON in files else VOCAB_JSON
        self._piece_to_id = parse_vocab_json(files[vocab_file], f"{location}{vocab_file}")
        self.vocab_size = max(self._piece_to_id.values()) + 1  # an id may have no piece
        self._id_to_piece = {token_id: piece for piece, token_id in self._piece_to_id.items()}
        for role in ("unk", "eos"):
            if role_tokens.get(role) not in self._piece_to_id:
                token = quote(role_tokens.get(role))
                raise InputError(f"{location}{vocab_file}: has no {token}; it is not the vocabulary of this model")
        self._unk_id, self._eos_id = self._piece_to_id[role_tokens["unk"]], self._piece_to_id[role_tokens["eos"]]
        self.special_tokens = [name for name in role_tokens.values() if name in self._piece_to_id]
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)))
        probe(self.encode_ids, f"{location}{name}", pairs=False)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return SentencePieceBackend, self._init_args

    def encode_ids(self, text: str) -> list[int]:
        language_code, rest = _split_language_code(text)
        pieces = self._spm.encode_as_pieces(rest)
        return [self._piece_id(piece) for piece in ([language_code, *pieces] if language_code else pieces)]

    def encode_ids_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode_ids(text) for text in texts]

    def encode(
        self, text: TextInput, pair: TextInput | None, *, add_special_tokens: bool, parse_special_tokens: bool
    ) -> Encoding:
        encoding = Encoding([], [], [], [], [])
        for sequence_id, text_input in enumerate((text, pair)):
            if text_input is not None:
                self._append_text(encoding, sequence_id, text_input, parse_special_tokens)
        if add_special_tokens:
            for column, value in zip(_columns(encoding), (self._eos_id, 0, (0, 0), None, None), strict=True):
                column.append(value)
        return encoding

    def encode_batch(self, inputs: Sequence[str | tuple[str, str]], *, parse_special_tokens: bool) -> list[Encoding]:
        pairs = [(item, None) if isinstance(item, str) else item for item in inputs]
        return [
            self.encode(text, pair, add_special_tokens=True, parse_special_tokens=parse_special_tokens)
            for text, pair in pairs
        ]

    def decode(self, ids: Sequence[int]) -> str:
        pieces = [self._id_to_piece.get(token_id, "") for token_id in ids]
        text = str(self._spm.decode_pieces([piece for piece in pieces if piece and piece not in self.special_tokens]))
        # sentencepiece leaves the space mark in pieces that only the other side's model contains
        return text.replace("▁", " ").strip()

    def display_token(self, token_id: int) -> str:
        return self._id_to_piece.get(token_id, f"<{token_id}>").replace("▁", " ")

    def token_to_id(self, token: str) -> int | None:
        return self._piece_to_id.get(token)

    def id_to_token(self, token_id: int) -> str | None:
        return self._id_to_piece.get(token_id)

    def _append_text(
        self, encoding: Encoding, sequence_id: int, text_input: TextInput, parse_special_tokens: bool
    ) -> None:
        texts = [text_input] if isinstance(text_input, str) else text_input
        for word_index, text in enumerate(texts):
            word = -1
            for span, token_id in self._iter_spans(text, parse_special_tokens):
                word += word < 0 or span.piece.startswith("▁") or span.piece in self.special_tokens
                values = (
                    token_id,
                    0,
                    (span.start, span.end),
                    word if isinstance(text_input, str) else word_index,
                    sequence_id,
                )
                for column, value in zip(_columns(encoding), values, strict=True):
                    column.append(value)

    def _iter_spans(self, text: str, parse_special_tokens: bool) -> Iterator[tuple[PieceSpan, int]]:
        offset = 0
        for match in self._special_pattern.finditer(text) if parse_special_tokens else ():
            yield from self._iter_plain_spans(text[offset : match.start()], offset)
            yield PieceSpan(match[0], *match.span()), self._piece_to_id[match[0]]
            offset = match.end()
        yield from self._iter_plain_spans(text[offset:], offset)

    def _iter_plain_spans(self, text: str, offset: int) -> Iterator[tuple[PieceSpan, int]]:
        language_code, rest = _split_language_code(text)
        if language_code:
            yield PieceSpan(language_code, offset, offset + len(language_code)), self._piece_id(language_code)
        offset += len(text) - len(rest)
        for piece, start, end in parse_spans(self._spm.encode_as_serialized_proto(rest), rest):
            # the first piece of a word contains the space before it; the span does not
            start = min(end, start + len(rest[start:end]) - len(rest[start:end].lstrip()))
            yield PieceSpan(piece, offset + start, offset + end), self._piece_id(piece)

    def _piece_id(self, piece: str) -> int:
        # a run of unknown characters is one piece and may be the name of a special token
        return self._unk_id if piece in self.special_tokens else self._piece_to_id.get(piece, self._unk_id)


def _columns(encoding: Encoding) -> tuple[list[Any], ...]:
    return encoding.ids, encoding.token_type_ids, encoding.offsets, encoding.word_ids, encoding.sequence_ids


def _split_language_code(text: str) -> tuple[str, str]:
    match = _LANGUAGE_CODE.match(text)
    return (match[0], text[match.end() :]) if match else ("", text)


def _load_sentencepiece(content: bytes, location: str) -> Any:
    model = parse_model(content, location)  # its errors name the problem of the file, the library's do not
    if model.charsmap:
        check_charsmap(model.charsmap, location)
    try:
        import sentencepiece
    except ImportError:
        raise InputError(f"{location}: reading it needs sentencepiece; pip install 'qkv[sentencepiece]'") from None
    try:
        return call_quietly(lambda: sentencepiece.SentencePieceProcessor(model_proto=content))
    except ValueError:
        raise InputError(f"{location}: damaged or not a SentencePiece model; copy it again") from None
