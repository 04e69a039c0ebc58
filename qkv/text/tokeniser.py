"""Text to ids and back: trained here or read from a checkpoint.

A tokeniser that is trained here for no family in particular has four special tokens at ids 0..3, others have their
family's. In any tokeniser they are structure, never text: whatever a user writes, `<s>` included, is read as ordinary
characters, so that no input can end a sentence or start another one. Only `special=True` recognises them, for a text
in which somebody wrote [MASK] on purpose.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from qkv.errors import InputError
from qkv.files import write_text
from qkv.text.engine import Engine, Fast, Framed, parse, refuse_broken_unicode
from qkv.text.marian import Marian
from qkv.text.template import END, PAD, ROLES, SPECIALS, START, UNK, Template
from qkv.text.training import learn

__all__ = ["END", "PAD", "ROLES", "SPECIALS", "START", "UNK", "NotOurs", "Tokeniser", "train_tokeniser"]

_VISIBLE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"})


class Tokeniser:
    """Cuts text into ids and never cuts a sentence short, pads it, or reads a special token in it.

    `roles` says which id has which role; without it the tokeniser is one of ours, with the four special tokens at hand.
    `files` are those of the checkpoint folder that it was read from, for `write_tokenisers` to give back.
    """

    def __init__(
        self,
        engine: Engine | Tokenizer,
        roles: Mapping[str, int] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self.engine: Engine = Fast(engine) if isinstance(engine, Tokenizer) else engine
        self.ours = roles is None
        self.roles: dict[str, int] = _our_roles(self.engine) if roles is None else dict(roles)
        self.files: dict[str, bytes] = dict(files or {})
        self.pad, self.unk, self.start, self.end, self.mask, self.cls, self.sep = map(self.roles.get, ROLES)

    def __reduce__(self) -> tuple[type[Tokeniser], tuple[Any, ...]]:
        return Tokeniser, (self.engine, None if self.ours else self.roles, self.files)

    @property
    def size(self) -> int:
        """Number of ids, the special ones included."""
        return self.engine.size

    def id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary, e.g. T5's `<extra_id_0>`; None if it has none."""
        return self.engine.number(token)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, nothing added."""
        refuse_broken_unicode(text, "text")
        return self.engine.ids(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, in parallel and without the bookkeeping of offsets."""
        for number, text in enumerate(texts, 1):
            refuse_broken_unicode(text, f"text {number}")
        return self.engine.ids_batch(texts)

    def frame(self, text: str, pair: str | None = None, *, special: bool = False) -> Framed:
        """`text`, or two texts, in the tokeniser's own template, e.g. [CLS] text [SEP] pair [SEP].

        `special` reads special tokens in the text as such: "the [MASK] sat".
        """
        refuse_broken_unicode(text, "text")
        refuse_broken_unicode(pair or "", "pair")
        return self.engine.cut(text, pair, template=True, special=special)

    def frame_batch(self, inputs: Sequence[str | tuple[str, str]], *, special: bool = False) -> list[Framed]:
        """`frame` of each text, or of each (text, pair), in parallel."""
        for number, given in enumerate(inputs, 1):
            for text in (given,) if isinstance(given, str) else given:
                refuse_broken_unicode(text, f"text {number}")
        return self.engine.cut_batch(inputs, special=special)

    def frame_words(self, words: Sequence[str], pair: Sequence[str] | None = None) -> Framed:
        """`frame` of a text that is already cut into words, for tagging: `words` then tells which one a token is of.

        Byte-level BPE reads each word, the first one too, with a space before it; a word may have no token at all.
        """
        for number, word in enumerate([*words, *(pair or ())], 1):
            refuse_broken_unicode(word, f"word {number}")
        return self.engine.cut(list(words), None if pair is None else list(pair), template=True, special=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens leave no trace."""
        return self.engine.text(ids)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """One label for each id, for plots: white space made visible, special tokens by name."""
        return [self.engine.label(number).translate(_VISIBLE) for number in ids]

    def pieces(self, text: str) -> list[str]:
        """One label for each id of `text`, for plots: as `tokens`, but an unknown piece as the user wrote it."""
        return [
            (text[first:last] if number == self.unk else self.engine.label(number)).translate(_VISIBLE)
            for number, (first, last) in self._spans(text)
        ]

    def unknown(self, text: str) -> str | None:
        """The first piece of `text` that has no id, as the user wrote it; None when every piece has one."""
        return next((text[first:last] for number, (first, last) in self._spans(text) if number == self.unk), None)

    def _spans(self, text: str) -> Iterator[tuple[int, tuple[int, int]]]:
        refuse_broken_unicode(text, "text")
        found = self.engine.cut(text, None, template=False, special=False)
        return zip(found.ids, found.offsets, strict=True)

    def save(self, path: str | Path) -> None:
        """Writes one JSON file: tokenizers' own for one of ours, else that with roles and files beside it."""
        write_text(Path(path), self._to_json())

    def _to_json(self) -> str:
        fast = self.engine.to_json() if isinstance(self.engine, Fast) else None
        if self.ours and fast is not None:
            return fast
        files = {name: base64.b64encode(zlib.compress(content)).decode() for name, content in self.files.items()}
        about: dict[str, object] = {"roles": self.roles, "files": files}
        if isinstance(self.engine, Marian):
            about["marian"] = {"side": self.engine.side, "names": dict(self.engine.names)}
        return json.dumps({"qkv": about, "tokenizer": json.loads(fast) if fast else None}, ensure_ascii=False)

    @classmethod
    def load(cls, path: str | Path) -> Tokeniser:
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
    def _from_json(cls, text: str) -> Tokeniser:
        whole = json.loads(text)
        if not isinstance(whole, dict) or "qkv" not in whole:
            return cls(parse(text))
        about = whole["qkv"]
        files = {name: zlib.decompress(base64.b64decode(content)) for name, content in about["files"].items()}
        if "marian" in about:
            engine: Engine = Marian(files, about["marian"]["side"], about["marian"]["names"])
        else:
            engine = Fast.read(json.dumps(whole["tokenizer"]))
        return cls(engine, {role: int(about["roles"][role]) for role in ROLES if role in about["roles"]}, files)


class NotOurs(InputError):
    """A tokenizer.json that somebody else made, whose special tokens have other names or ids."""


def _our_roles(engine: Engine) -> dict[str, int]:
    missing = [name for name in SPECIALS if engine.number(name) is None]
    if missing:
        raise NotOurs(f"not a qkv tokeniser: it has no {', '.join(missing)}; train one with qkv")
    if [engine.number(name) for name in SPECIALS] != list(range(len(SPECIALS))):
        raise NotOurs(f"not a qkv tokeniser: {', '.join(SPECIALS)} are not its first ids; train one with qkv")
    return {role: number for number, role in enumerate(ROLES[: len(SPECIALS)])}


def train_tokeniser(
    kind: str,
    lines: Iterable[str],
    *,
    size: int | None = None,
    lowercase: bool | None = None,
    template: Template | None = None,
) -> Tokeniser:
    """Learn a vocabulary from `lines`, read once; the same lines in any order give the same tokeniser.

    The kinds are character, symbol, bpe (byte-level) and a family's own: wordpiece, byte_bpe, word_bpe, unigram. With a
    family's `template` it has the special tokens of that family at their ids and frames texts as the family does; with
    none it has the usual four and adds nothing. `size` counts the special tokens; it is an upper limit, and may be left
    out for character and symbol. `lowercase` is by default the template's.
    """
    tokenizer, roles = learn(kind, lines, size, lowercase, template)
    return Tokeniser(tokenizer, roles)
