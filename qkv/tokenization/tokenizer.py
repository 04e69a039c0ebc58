"""Text to ids and back: trained here or read from a checkpoint.

A tokeniser that is trained here for no family in particular has four special tokens at ids 0..3, others have their
family's. In any tokeniser they are structure, never text: whatever a user writes, `<s>` included, is read as ordinary
characters, so that no input can end a sentence or start another one. Only `parse_special_tokens=True` recognises them, for a text
in which somebody wrote [MASK] on purpose.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from qkv.errors import InputError
from qkv.files import atomic_write_text
from qkv.tokenization.backend import Encoding, FastBackend, TokenizerBackend, check_unicode, parse_tokenizer_json
from qkv.tokenization.marian import MarianBackend
from qkv.tokenization.template import BOS, EOS, PAD, ROLES, SPECIAL_TOKENS, UNK, Template
from qkv.tokenization.train_vocab import train_vocab

__all__ = ["BOS", "EOS", "PAD", "ROLES", "SPECIAL_TOKENS", "UNK", "ForeignTokenizerError", "Tokenizer", "train_tokenizer"]

_VISIBLE_WHITESPACE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"})


class Tokenizer:
    """Cuts text into ids and never cuts a sentence short, pads it, or reads a special token in it.

    `special_ids` says which id has which role; without it the tokeniser is one of ours, with the four special tokens at hand.
    `files` are those of the checkpoint folder that it was read from, for `save_tokenizers` to give back.
    """

    def __init__(
        self,
        backend: TokenizerBackend | HFTokenizer,
        special_ids: Mapping[str, int] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self.backend: TokenizerBackend = FastBackend(backend) if isinstance(backend, HFTokenizer) else backend
        self.is_native = special_ids is None
        self.special_ids: dict[str, int] = _native_special_ids(self.backend) if special_ids is None else dict(special_ids)
        self.files: dict[str, bytes] = dict(files or {})
        self.pad_id, self.unk_id, self.bos_id, self.eos_id, self.mask_id, self.cls_id, self.sep_id = map(self.special_ids.get, ROLES)

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[Any, ...]]:
        return Tokenizer, (self.backend, None if self.is_native else self.special_ids, self.files)

    @property
    def vocab_size(self) -> int:
        """Number of ids, the special ones included."""
        return self.backend.vocab_size

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary, e.g. T5's `<extra_id_0>`; None if it has none."""
        return self.backend.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, nothing added."""
        check_unicode(text, "text")
        return self.backend.encode_ids(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, in parallel and without the bookkeeping of offsets."""
        for number, text in enumerate(texts, 1):
            check_unicode(text, f"text {number}")
        return self.backend.encode_ids_batch(texts)

    def encode_plus(self, text: str, pair: str | None = None, *, parse_special_tokens: bool = False) -> Encoding:
        """`text`, or two texts, in the tokeniser's own template, e.g. [CLS] text [SEP] pair [SEP].

        `parse_special_tokens` reads special tokens in the text as such: "the [MASK] sat".
        """
        check_unicode(text, "text")
        check_unicode(pair or "", "pair")
        return self.backend.encode(text, pair, add_special_tokens=True, parse_special_tokens=parse_special_tokens)

    def encode_plus_batch(self, inputs: Sequence[str | tuple[str, str]], *, parse_special_tokens: bool = False) -> list[Encoding]:
        """`encode_plus` of each text, or of each (text, pair), in parallel."""
        for number, item in enumerate(inputs, 1):
            for text in (item,) if isinstance(item, str) else item:
                check_unicode(text, f"text {number}")
        return self.backend.encode_batch(inputs, parse_special_tokens=parse_special_tokens)

    def encode_pretokenized(self, words: Sequence[str], pair: Sequence[str] | None = None) -> Encoding:
        """`encode_plus` of a text that is already cut into words, for tagging: `word_ids` then tells which one a token is of.

        Byte-level BPE reads each word, the first one too, with a space before it; a word may have no token at all.
        """
        for number, word in enumerate([*words, *(pair or ())], 1):
            check_unicode(word, f"word {number}")
        return self.backend.encode(list(words), None if pair is None else list(pair), add_special_tokens=True, parse_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens leave no trace."""
        return self.backend.decode(ids)

    def ids_to_display(self, ids: Sequence[int]) -> list[str]:
        """One label for each id, for plots: white space made visible, special tokens by name."""
        return [self.backend.display_token(token_id).translate(_VISIBLE_WHITESPACE) for token_id in ids]

    def display_tokens(self, text: str) -> list[str]:
        """One label for each id of `text`, for plots: as `ids_to_display`, but an unknown piece as the user wrote it."""
        return [
            (text[start:end] if token_id == self.unk_id else self.backend.display_token(token_id)).translate(_VISIBLE_WHITESPACE)
            for token_id, (start, end) in self._iter_token_spans(text)
        ]

    def first_unknown(self, text: str) -> str | None:
        """The first piece of `text` that has no id, as the user wrote it; None when every piece has one."""
        return next((text[start:end] for token_id, (start, end) in self._iter_token_spans(text) if token_id == self.unk_id), None)

    def _iter_token_spans(self, text: str) -> Iterator[tuple[int, tuple[int, int]]]:
        check_unicode(text, "text")
        encoding = self.backend.encode(text, None, add_special_tokens=False, parse_special_tokens=False)
        return zip(encoding.ids, encoding.offsets, strict=True)

    def save(self, path: str | Path) -> None:
        """Writes one JSON file: tokenizers' own for one of ours, else that with roles and files beside it."""
        atomic_write_text(Path(path), self._to_json())

    def _to_json(self) -> str:
        backend_json = self.backend.to_json() if isinstance(self.backend, FastBackend) else None
        if self.is_native and backend_json is not None:
            return backend_json
        files = {name: base64.b64encode(zlib.compress(content)).decode() for name, content in self.files.items()}
        metadata: dict[str, object] = {"roles": self.special_ids, "files": files}
        if isinstance(self.backend, MarianBackend):
            metadata["marian"] = {"side": self.backend.side, "names": dict(self.backend.role_tokens)}
        return json.dumps({"qkv": metadata, "tokenizer": json.loads(backend_json) if backend_json else None}, ensure_ascii=False)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read what `save` wrote; the file alone is enough."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as problem:
            raise InputError(f"{path}: cannot read the tokeniser ({problem.strerror}); check the path") from None
        except UnicodeDecodeError:
            raise InputError(f"{path}: not a tokeniser (not UTF-8 text); give a tokenizer.json") from None
        try:
            return cls._from_json(text)
        except InputError as problem:
            raise type(problem)(f"{path}: {problem}") from None
        except (ValueError, TypeError, KeyError, AttributeError, zlib.error) as problem:
            raise InputError(f"{path}: damaged or not a tokenizer.json ({problem}); train or copy it again") from None

    @classmethod
    def _from_json(cls, text: str) -> Tokenizer:
        raw_json = json.loads(text)
        if not isinstance(raw_json, dict) or "qkv" not in raw_json:
            return cls(parse_tokenizer_json(text))
        metadata = raw_json["qkv"]
        _check_roles([*metadata["roles"], *(metadata["marian"]["names"] if "marian" in metadata else ())])
        files = {name: zlib.decompress(base64.b64decode(content)) for name, content in metadata["files"].items()}
        if "marian" in metadata:
            backend: TokenizerBackend = MarianBackend(files, metadata["marian"]["side"], metadata["marian"]["names"])
        else:
            backend = FastBackend.from_json(json.dumps(raw_json["tokenizer"]))
        return cls(backend, {role: int(metadata["roles"][role]) for role in ROLES if role in metadata["roles"]}, files)


class ForeignTokenizerError(InputError):
    """A tokenizer.json that somebody else made, whose special tokens have other names or ids."""


def _check_roles(roles: Iterable[str]) -> None:
    unknown = next((role for role in roles if role not in ROLES), None)
    if unknown is not None:
        reason = f"special-token role '{unknown}' is unknown; the roles are {', '.join(ROLES)}"
        raise InputError(f"{reason} (was it saved by an older qkv? train or import the tokeniser again)")


def _native_special_ids(backend: TokenizerBackend) -> dict[str, int]:
    missing = [token for token in SPECIAL_TOKENS if backend.token_to_id(token) is None]
    if missing:
        raise ForeignTokenizerError(f"not a qkv tokeniser: it has no {', '.join(missing)}; train one with qkv")
    if [backend.token_to_id(token) for token in SPECIAL_TOKENS] != list(range(len(SPECIAL_TOKENS))):
        raise ForeignTokenizerError(f"not a qkv tokeniser: {', '.join(SPECIAL_TOKENS)} are not its first ids; train one with qkv")
    return {role: token_id for token_id, role in enumerate(ROLES[: len(SPECIAL_TOKENS)])}


def train_tokenizer(
    kind: str,
    lines: Iterable[str],
    *,
    vocab_size: int | None = None,
    lowercase: bool | None = None,
    template: Template | None = None,
) -> Tokenizer:
    """Learn a vocabulary from `lines`, read once; the same lines in any order give the same tokeniser.

    The kinds are character, whitespace, bpe (byte-level) and a family's own: wordpiece, byte_bpe, word_bpe, unigram. With a
    family's `template` it has the special tokens of that family at their ids and frames texts as the family does; with
    none it has the usual four and adds nothing. `vocab_size` counts the special tokens; it is an upper limit, and may be left
    out for character and whitespace. `lowercase` is by default the template's.
    """
    backend, special_ids = train_vocab(kind, lines, vocab_size, lowercase, template)
    return Tokenizer(backend, special_ids)
