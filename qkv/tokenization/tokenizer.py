"""Tokenizers: text to ids and back, trained here or read from a checkpoint.

A tokenizer that is trained without a family's template has four special tokens with ids 0 to 3; others have the special
tokens of their family. A text never contains special tokens: "<s>" in a user's input is read as ordinary characters, so
that no input can end a sequence or start another one. Only `parse_special_tokens=True` recognizes them, for texts such
as "the [MASK] sat".
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from qkv.errors import InputError, quote
from qkv.files import atomic_write_text, parse_json, read_text_file
from qkv.limits import limit, raise_hint
from qkv.tokenization.backend import Encoding, FastBackend, TokenizerBackend, check_unicode
from qkv.tokenization.sentencepiece_pair import SentencePieceBackend
from qkv.tokenization.template import BOS, EOS, PAD, ROLES, SPECIAL_TOKENS, UNK, Template
from qkv.tokenization.train_vocab import train_vocab

__all__ = [
    "BOS",
    "EOS",
    "PAD",
    "ROLES",
    "SPECIAL_TOKENS",
    "UNK",
    "ForeignTokenizerError",
    "Tokenizer",
    "train_tokenizer",
]

_SENTENCEPIECE = "sentencepiece_pair"  # key of the backend's settings in a saved file
_VISIBLE_WHITESPACE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"})


class Tokenizer:
    """Splits text into tokens, without truncation or padding."""

    def __init__(
        self,
        backend: TokenizerBackend | HFTokenizer,
        special_ids: Mapping[str, int] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Wrap a backend.

        Args:
            backend: the object that splits texts.
            special_ids: id of each role's special token; None: a tokenizer trained here with the four special tokens.
            files: files of the checkpoint folder that it was read from; `save_tokenizers` writes them unchanged.
        """
        self.backend: TokenizerBackend = FastBackend(backend) if isinstance(backend, HFTokenizer) else backend
        self.is_native = special_ids is None
        self.special_ids: dict[str, int] = (
            _native_special_ids(self.backend) if special_ids is None else dict(special_ids)
        )
        self.files: dict[str, bytes] = dict(files or {})
        self.pad_id, self.unk_id, self.bos_id, self.eos_id, self.mask_id, self.cls_id, self.sep_id = map(
            self.special_ids.get, ROLES
        )

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[Any, ...]]:
        return Tokenizer, (self.backend, None if self.is_native else self.special_ids, self.files)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including the special ones."""
        return self.backend.vocab_size

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary, such as T5's `<extra_id_0>`; None if it is unknown."""
        return self.backend.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""
        check_unicode(text, "text")
        return self.backend.encode_ids(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens; runs in parallel and computes no offsets."""
        for number, text in enumerate(texts, 1):
            check_unicode(text, f"text {number}")
        return self.backend.encode_ids_batch(texts)

    def encode_plus(self, text: str, pair: str | None = None, *, parse_special_tokens: bool = False) -> Encoding:
        """Return the model input for one text or two, such as [CLS] text [SEP] pair [SEP].

        Args:
            text: the text.
            pair: the second text.
            parse_special_tokens: recognize special tokens in the texts, such as [MASK] in "the [MASK] sat".
        """
        check_unicode(text, "text")
        check_unicode(pair or "", "pair")
        return self.backend.encode(text, pair, add_special_tokens=True, parse_special_tokens=parse_special_tokens)

    def encode_plus_batch(
        self, inputs: Sequence[str | tuple[str, str]], *, parse_special_tokens: bool = False
    ) -> list[Encoding]:
        """Return the model input for each text or (text, pair), in parallel; see `encode_plus`."""
        for number, item in enumerate(inputs, 1):
            for text in (item,) if isinstance(item, str) else item:
                check_unicode(text, f"text {number}")
        return self.backend.encode_batch(inputs, parse_special_tokens=parse_special_tokens)

    def encode_pretokenized(self, words: Sequence[str], pair: Sequence[str] | None = None) -> Encoding:
        """Return the model input for a text that is split into words already; `word_ids` maps tokens to these words.

        Byte-level BPE puts a space before each word, including the first. A word may have no token at all.
        """
        for number, word in enumerate([*words, *(pair or ())], 1):
            check_unicode(word, f"word {number}")
        return self.backend.encode(
            list(words), None if pair is None else list(pair), add_special_tokens=True, parse_special_tokens=False
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids, without special tokens."""
        return self.backend.decode(ids)

    def ids_to_display(self, ids: Sequence[int]) -> list[str]:
        """Return one label per id for plots, with visible white space and the names of special tokens."""
        return [self.backend.display_token(token_id).translate(_VISIBLE_WHITESPACE) for token_id in ids]

    def display_tokens(self, text: str) -> list[str]:
        """Return one label per token of a text for plots; an unknown token is shown as it is in the text."""
        return [
            (text[start:end] if token_id == self.unk_id else self.backend.display_token(token_id)).translate(
                _VISIBLE_WHITESPACE
            )
            for token_id, (start, end) in self._iter_token_spans(text)
        ]

    def first_unknown(self, text: str) -> str | None:
        """Return the first part of a text that is an unknown token; None if there is none."""
        return next(
            (text[start:end] for token_id, (start, end) in self._iter_token_spans(text) if token_id == self.unk_id),
            None,
        )

    def _iter_token_spans(self, text: str) -> Iterator[tuple[int, tuple[int, int]]]:
        check_unicode(text, "text")
        encoding = self.backend.encode(text, None, add_special_tokens=False, parse_special_tokens=False)
        return zip(encoding.ids, encoding.offsets, strict=True)

    def save(self, path: str | Path) -> None:
        """Write one JSON file: a plain tokenizer.json, or for a tokenizer of a checkpoint one with roles and files."""
        atomic_write_text(Path(path), self._to_json())

    def _to_json(self) -> str:
        backend_json = self.backend.to_json() if isinstance(self.backend, FastBackend) else None
        if self.is_native and backend_json is not None:
            return backend_json
        files = {name: base64.b64encode(zlib.compress(content)).decode() for name, content in self.files.items()}
        metadata: dict[str, object] = {"roles": self.special_ids, "files": files}
        if isinstance(self.backend, SentencePieceBackend):
            metadata[_SENTENCEPIECE] = {"side": self.backend.side, "names": dict(self.backend.role_tokens)}
        tokenizer = json.loads(backend_json) if backend_json else None
        return json.dumps({"qkv": metadata, "tokenizer": tokenizer}, ensure_ascii=False)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a file that `save` wrote."""
        location, text = str(path), read_text_file(path)
        raw_json = parse_json(text, location)
        if not isinstance(raw_json, dict) or "qkv" not in raw_json:
            return cls._from_plain(FastBackend.from_json(text, raw_json, location), location)
        try:
            return cls._from_saved(raw_json, location)
        except InputError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, zlib.error) as problem:
            reason = f"damaged or not a tokenizer.json ({quote(str(problem), 100)})"
            raise InputError(f"{location}: {reason}; train or copy it again") from None

    @classmethod
    def _from_plain(cls, backend: FastBackend, location: str) -> Tokenizer:
        try:
            return cls(backend)
        except ForeignTokenizerError as problem:
            raise ForeignTokenizerError(f"{location}: {problem}") from None

    @classmethod
    def _from_saved(cls, raw_json: dict[str, Any], location: str) -> Tokenizer:
        """Return the tokenizer of a checkpoint that `save` wrote with its roles and files."""
        metadata = raw_json["qkv"]
        sentencepiece = metadata.get(_SENTENCEPIECE)
        _check_roles([*metadata["roles"], *(sentencepiece["names"] if sentencepiece else ())], location)
        files = {name: _decompress(base64.b64decode(content)) for name, content in metadata["files"].items()}
        if sentencepiece:
            backend: TokenizerBackend = SentencePieceBackend(
                files, sentencepiece["side"], sentencepiece["names"], f"{location}: "
            )
        else:
            plain_json = raw_json["tokenizer"]
            backend = FastBackend.from_json(json.dumps(plain_json), plain_json, location)
        special_ids = {role: metadata["roles"][role] for role in ROLES if role in metadata["roles"]}
        for role, token_id in special_ids.items():
            if type(token_id) is not int or not 0 <= token_id < backend.vocab_size:
                reason = f"the role '{role}' has the id {quote(token_id, 20)}"
                raise InputError(f"{location}: {reason}, which is not one of its {backend.vocab_size:,} ids")
        return cls(backend, special_ids, files)


class ForeignTokenizerError(InputError):
    """A tokenizer.json that was not written by qkv: its special tokens have other names or ids."""


def _decompress(content: bytes) -> bytes:
    """Return the content of a compressed file; one that grows over the limit of a file is refused."""
    decompressor = zlib.decompressobj()
    result = decompressor.decompress(content, limit("config_bytes"))
    if decompressor.unconsumed_tail:
        raise ValueError(f"a file in it has too many bytes, {raise_hint('config_bytes')}")
    if not decompressor.eof:
        raise ValueError("a file in it is not complete")
    return result


def _check_roles(roles: Iterable[str], location: str) -> None:
    unknown = next((role for role in roles if role not in ROLES), None)
    if unknown is not None:
        reason = f"special-token role {quote(unknown)} is unknown; the roles are {', '.join(ROLES)}"
        raise InputError(f"{location}: {reason} (was it saved by an older qkv? train or import the tokenizer again)")


def _native_special_ids(backend: TokenizerBackend) -> dict[str, int]:
    missing = [token for token in SPECIAL_TOKENS if backend.token_to_id(token) is None]
    if missing:
        raise ForeignTokenizerError(f"not a qkv tokenizer: it has no {', '.join(missing)}; train one with qkv")
    if [backend.token_to_id(token) for token in SPECIAL_TOKENS] != list(range(len(SPECIAL_TOKENS))):
        names = ", ".join(SPECIAL_TOKENS)
        raise ForeignTokenizerError(f"not a qkv tokenizer: {names} are not its first ids; train one with qkv")
    return {role: token_id for token_id, role in enumerate(ROLES[: len(SPECIAL_TOKENS)])}


def train_tokenizer(
    kind: str,
    lines: Iterable[str],
    *,
    vocab_size: int | None = None,
    lowercase: bool | None = None,
    template: Template | None = None,
    min_count: int | None = None,
) -> Tokenizer:
    """Train a tokenizer; the order of the lines does not matter.

    Args:
        kind: character, whitespace, bpe (byte-level), or a family's kind: wordpiece, byte_bpe, word_bpe, unigram,
            word (whole words and punctuation), spelled_word (the same, other words being spelled).
        lines: the text, read once.
        vocab_size: maximum number of tokens, including special ones; optional for character and whitespace.
        lowercase: lowercase texts; None: as in the template.
        template: adds the special tokens of a family, with their ids, to the vocabulary and to model inputs; None: the
            vocabulary has the four special tokens, and model inputs have none.
        min_count: words that occur less often are no tokens (`word` and `spelled_word` only); None: no such limit.
    """
    backend, special_ids = train_vocab(kind, lines, vocab_size, lowercase, template, min_count)
    return Tokenizer(backend, special_ids)
