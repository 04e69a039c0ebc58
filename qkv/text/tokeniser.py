"""Text to ids and back: characters, space-separated symbols or byte-level BPE, each trained here and kept in one file.

Every tokeniser has the same four special tokens at ids 0..3. They are structure, never text: whatever a user writes,
`<s>` included, is read as ordinary characters, so that no input can end a sentence or start another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from qkv.errors import InputError, nearest
from qkv.files import write_text

PAD, UNK, START, END = "<pad>", "<unk>", "<s>", "</s>"
SPECIALS = (PAD, UNK, START, END)

_BYTES = 256
_NO_LIMIT = 2**31
# Put after the "<" of a user's "<s>" where a whole word could otherwise be looked up as the special token; invisible,
# not white space, and taken out again when decoding.
_ESCAPE = "\u2060"
_VISIBLE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"})


class Tokeniser:
    """A `tokenizers.Tokenizer` that never adds, cuts or pads, and that reads special tokens in a text as plain text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = {name: tokenizer.token_to_id(name) for name in SPECIALS}
        missing = [name for name, number in ids.items() if number is None]
        if missing:
            raise InputError(f"not a qkv tokeniser: it has no {', '.join(missing)}; train one with qkv")
        tokenizer.no_padding()
        tokenizer.no_truncation()
        # Not part of the JSON, so it is set on every way in: training, loading, unpickling.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.pad, self.unk, self.start, self.end = (number for number in ids.values() if number is not None)

    def __reduce__(self) -> tuple[type[Tokeniser], tuple[Tokenizer]]:
        return Tokeniser, (self._tokenizer,)

    @property
    def size(self) -> int:
        """Number of ids, the special ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, nothing added."""
        _refuse_broken_unicode(text, "text")
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, in parallel and without the bookkeeping of offsets."""
        for number, text in enumerate(texts, 1):
            _refuse_broken_unicode(text, f"text {number}")
        return [found.ids for found in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens leave no trace."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """One label for each id, for plots: white space made visible, special tokens by name."""
        return [self._label(number) for number in ids]

    def pieces(self, text: str) -> list[str]:
        """One label for each id of `text`, for plots: as `tokens`, but an unknown piece as the user wrote it."""
        _refuse_broken_unicode(text, "text")
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return [
            text[first:last].translate(_VISIBLE) if number == self.unk else self._label(number)
            for number, (first, last) in zip(found.ids, found.offsets, strict=True)
        ]

    def unknown(self, text: str) -> str | None:
        """The first piece of `text` that has no id, as the user wrote it; None when every piece has one."""
        _refuse_broken_unicode(text, "text")
        found = self._tokenizer.encode(text, add_special_tokens=False)
        if self.unk not in found.ids:
            return None
        first, last = found.offsets[found.ids.index(self.unk)]
        return text[first:last]

    def _label(self, number: int) -> str:
        if number in (self.pad, self.unk, self.start, self.end):
            return str(self._tokenizer.id_to_token(number))
        text = self._tokenizer.decode([number], skip_special_tokens=False)
        # Half a character (byte-level BPE may cut inside one) has no text of its own; its raw name tells it apart.
        readable = bool(text) and "\ufffd" not in text
        label = text if readable else (self._tokenizer.id_to_token(number) or f"<{number}>")
        return str(label).translate(_VISIBLE)

    def save(self, path: str | Path) -> None:
        """Writes tokenizers' own JSON; no reader ever meets half a file."""
        write_text(Path(path), self._tokenizer.to_str(pretty=True))

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
            tokenizer = Tokenizer.from_str(text)
        except Exception as problem:  # tokenizers raises the bare class for every kind of damage
            reason = " ".join(str(problem).split())
            raise InputError(f"{path}: damaged or not a tokenizer.json ({reason}); train or copy it again") from None
        try:
            return cls(tokenizer)
        except InputError as problem:
            raise InputError(f"{path}: {problem}") from None


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
