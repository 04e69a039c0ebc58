"""Text to ids and back: trained here (characters, space-separated symbols, byte-level BPE) or read from a checkpoint.

Every tokeniser that is trained here has the same four special tokens at ids 0..3. In any tokeniser they are structure,
never text: whatever a user writes, `<s>` included, is read as ordinary characters, so that no input can end a sentence
or start another one. Only `special=True` recognises them, for a text in which somebody wrote [MASK] on purpose.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from qkv.errors import InputError, nearest
from qkv.files import write_text
from qkv.text.engine import Engine, Fast, Framed, parse
from qkv.text.marian import Marian

PAD, UNK, START, END = "<pad>", "<unk>", "<s>", "</s>"
SPECIALS = (PAD, UNK, START, END)

# What a special token is for; which of them a tokeniser has, and under which name, its family decides.
ROLES = ("pad", "unk", "start", "end", "mask", "cls", "sep")

_BYTES = 256
_NO_LIMIT = 2**31
# Put after the "<" of a user's "<s>" where a whole word could otherwise be looked up as the special token; invisible,
# not white space, and taken out again when decoding.
_ESCAPE = "\u2060"
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
        _refuse_broken_unicode(text, "text")
        return self.engine.ids(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, in parallel and without the bookkeeping of offsets."""
        for number, text in enumerate(texts, 1):
            _refuse_broken_unicode(text, f"text {number}")
        return self.engine.ids_batch(texts)

    def frame(self, text: str, pair: str | None = None, *, special: bool = False) -> Framed:
        """`text`, or two texts, in the tokeniser's own template, e.g. [CLS] text [SEP] pair [SEP].

        `special` reads special tokens in the text as such: "the [MASK] sat".
        """
        _refuse_broken_unicode(text, "text")
        _refuse_broken_unicode(pair or "", "pair")
        return self.engine.cut(text, pair, template=True, special=special)

    def frame_batch(self, inputs: Sequence[str | tuple[str, str]], *, special: bool = False) -> list[Framed]:
        """`frame` of each text, or of each (text, pair), in parallel."""
        for number, given in enumerate(inputs, 1):
            for text in (given,) if isinstance(given, str) else given:
                _refuse_broken_unicode(text, f"text {number}")
        return self.engine.cut_batch(inputs, special=special)

    def frame_words(self, words: Sequence[str], pair: Sequence[str] | None = None) -> Framed:
        """`frame` of a text that is already cut into words, for tagging: `words` then tells which one a token is of.

        Byte-level BPE reads each word, the first one too, with a space before it; a word may have no token at all.
        """
        for number, word in enumerate([*words, *(pair or ())], 1):
            _refuse_broken_unicode(word, f"word {number}")
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
        _refuse_broken_unicode(text, "text")
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
            raise InputError(f"{path}: {problem}") from None
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


def _our_roles(engine: Engine) -> dict[str, int]:
    ids = {role: engine.number(name) for role, name in zip(ROLES, SPECIALS, strict=False)}
    missing = [name for name in SPECIALS if engine.number(name) is None]
    if missing:
        raise InputError(f"not a qkv tokeniser: it has no {', '.join(missing)}; train one with qkv")
    return {role: number for role, number in ids.items() if number is not None}


def train_tokeniser(kind: str, lines: Iterable[str], *, size: int | None = None, lowercase: bool = False) -> Tokeniser:
    """Learn a vocabulary from `lines`: most frequent first, ties in alphabetical order, whatever the order of lines.

    `size` counts the special tokens; it is a must for "bpe" and, for the other kinds, an upper limit.
    """
    if kind not in _KINDS:
        raise InputError(f"tokeniser kind '{kind}' is unknown; {nearest(kind, _KINDS)}")
    least = len(SPECIALS) + (_BYTES if kind == "bpe" else 1)
    if size is None and kind == "bpe":
        raise InputError(f"a bpe tokeniser needs a vocabulary size; set it to {least} or more")
    if size is not None and size < least:
        raise InputError(f"a {kind} tokeniser of size {size} is too small; set size to {least} or more")
    tokenizer, trainer = _KINDS[kind](size or _NO_LIMIT, lowercase)
    seen = _Checked(lines)
    tokenizer.train_from_iterator(seen, trainer)
    if not seen.any_text:
        raise InputError(f"no text to train the {kind} tokeniser on; give at least one line that is not blank")
    return Tokeniser(tokenizer)


def _character(size: int, lowercase: bool) -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.WordLevel(vocab={}, unk_token=UNK))
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    # Not ".", which would leave out the newline.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer, _word_trainer(size)


def _symbol(size: int, lowercase: bool) -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.WordLevel(vocab={}, unk_token=UNK))
    names = "|".join(name.strip("<>") for name in SPECIALS)
    escape = normalizers.Replace(Regex(f"<(?=(?:{names})>)"), f"<{_ESCAPE}")
    # Lowercase first: "<S>" would otherwise become a special token after the check for one.
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), escape] if lowercase else [escape])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # WordPiece's decoder is the one that joins with spaces; no symbol contains a space, so its prefix never matches.
    join = decoders.WordPiece(prefix=" ", cleanup=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(f"<{_ESCAPE}", "<"), join])
    return tokenizer, _word_trainer(size)


def _bpe(size: int, lowercase: bool) -> tuple[Tokenizer, trainers.Trainer]:
    """Byte-pair encoding (Sennrich et al., 2016) over bytes as in GPT-2 (Radford et al., 2019): nothing is unknown."""
    tokenizer = Tokenizer(models.BPE())
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    # Its pattern never puts "<", a name and ">" into one word, so that no chain of merges can spell a special token.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    return tokenizer, trainer


def _word_trainer(size: int) -> trainers.Trainer:
    return trainers.WordLevelTrainer(vocab_size=size, special_tokens=list(SPECIALS), show_progress=False)


_KINDS: dict[str, Callable[[int, bool], tuple[Tokenizer, trainers.Trainer]]] = {
    "character": _character,
    "symbol": _symbol,
    "bpe": _bpe,
}


class _Checked:
    """Hands lines on one at a time, so that a large corpus streams, and remembers whether any held text."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = lines
        self.any_text = False

    def __iter__(self) -> Iterator[str]:
        for number, line in enumerate(self._lines, 1):
            _refuse_broken_unicode(line, f"line {number} of the training text")
            self.any_text = self.any_text or bool(line.strip())
            yield line


def _refuse_broken_unicode(text: str, what: str) -> None:
    """Half a surrogate pair (from a JSON escape or a misread command line) has no UTF-8 form, hence no ids."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as problem:
        place = f"character {problem.start + 1}"
        raise InputError(f"{what}: not valid Unicode at {place} (a lone surrogate); remove or repair it") from None
