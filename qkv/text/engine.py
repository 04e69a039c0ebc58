"""How text is cut into ids: what a `Tokeniser` asks of the library below it, and the `tokenizers` side of the answer.

Special tokens are structure: unless a caller asks for them, no text can spell one, whatever the library makes of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Encoding, Tokenizer, decoders

from qkv.errors import InputError

# A text, or a text that somebody has already cut into words.
Given = str | Sequence[str]

# Before a special token's name in a vocabulary that text is looked up in: no pre-tokeniser leaves a space in a word.
_HIDDEN = "\x00 "


@dataclass(frozen=True)
class Framed:
    """One input of a model as its family writes it, e.g. [CLS] a [SEP] b [SEP]; the five lists are of one length."""

    ids: list[int]
    # which of the model's segment vectors each token takes (BERT's token types)
    segments: list[int]
    # the characters that a token stands for, in the text that `parts` names or, of given words, in its word
    offsets: list[tuple[int, int]]
    # which word of its part a token belongs to; an added token belongs to none
    words: list[int | None]
    # 0 for the text, 1 for the pair, None for what the template added
    parts: list[int | None]


class Engine(Protocol):
    """What cuts text for a `Tokeniser`. Any number of threads may use one."""

    @property
    def size(self) -> int: ...

    @property
    def specials(self) -> list[str]: ...

    def ids(self, text: str) -> list[int]: ...

    def ids_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def cut(self, text: Given, pair: Given | None, *, template: bool, special: bool) -> Framed: ...

    def cut_batch(self, inputs: Sequence[str | tuple[str, str]], *, special: bool) -> list[Framed]: ...

    def text(self, ids: Sequence[int]) -> str: ...

    def label(self, number: int) -> str: ...

    def number(self, name: str) -> int | None: ...

    def name(self, number: int) -> str | None: ...


class Fast:
    """A `tokenizers.Tokenizer` and its other readings of a text.

    Whether special tokens are recognised and whether words take a space are settings of the library's object, shared by
    all who hold it. So each combination is an object of its own, made when it is first asked for.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        # A foreign file may pad or cut by itself: kept for whoever gets the file back, never done here.
        self._limits = _limits(tokenizer)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        # Not part of the JSON, so it is set on every way in: training, loading, unpickling.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._specials = {number: token.content for number, token in added.items() if token.special}
        before = tokenizer.pre_tokenizer
        self._glues = before is not None and b'"add_prefix_space":false' in before.__getstate__()
        plain = tokenizer if not self._spellable() else _reading(tokenizer, special=False, words=False)
        self._readings = {(False, False): plain}

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Fast.read, (self.to_json(),)

    @classmethod
    def read(cls, text: str) -> Fast:
        return cls(parse(text))

    def to_json(self) -> str:
        """tokenizers' own JSON, complete: what `read` takes and what a Hugging Face folder holds."""
        text = str(self._tokenizer.to_str(pretty=True))
        return json.dumps({**json.loads(text), **self._limits}, ensure_ascii=False, indent=2) if self._limits else text

    @property
    def size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def specials(self) -> list[str]:
        return list(self._specials.values())

    def ids(self, text: str) -> list[int]:
        return list(self._reading(False, False).encode(text, add_special_tokens=False).ids)

    def ids_batch(self, texts: Sequence[str]) -> list[list[int]]:
        found = self._reading(False, False).encode_batch_fast(list(texts), add_special_tokens=False)
        return [one.ids for one in found]

    def cut(self, text: Given, pair: Given | None, *, template: bool, special: bool) -> Framed:
        words = not isinstance(text, str)
        tokenizer = self._reading(special, words)
        first, second = (one if one is None or isinstance(one, str) else list(one) for one in (text, pair))
        return _framed(tokenizer.encode(first, second, is_pretokenized=words, add_special_tokens=template))

    def cut_batch(self, inputs: Sequence[str | tuple[str, str]], *, special: bool) -> list[Framed]:
        return [_framed(found) for found in self._reading(special, False).encode_batch(list(inputs))]

    def text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def label(self, number: int) -> str:
        name = self.name(number)
        if name is None:
            return f"<{number}>"
        if number in self._specials:
            return name
        if isinstance(self._tokenizer.decoder, decoders.Metaspace):
            return name.replace("▁", " ")
        text = str(self._tokenizer.decode([number], skip_special_tokens=False))
        # Half a character (byte-level BPE may cut inside one) has no text of its own; its raw name tells it apart.
        return text if text and "\ufffd" not in text else name

    def number(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(name)

    def name(self, number: int) -> str | None:
        return self._tokenizer.id_to_token(number)

    def _spellable(self) -> bool:
        """Whether some text is a special token for the model itself: Unigram and whole words are looked up by name."""
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        names = [name for name in self.specials if name != unknown]
        # One by one: a batch would start the library's threads, and a process that has them does not fork well.
        return any(
            self.number(name) in self._tokenizer.encode(f"a {name} a", add_special_tokens=False).ids for name in names
        )

    def _reading(self, special: bool, words: bool) -> Tokenizer:
        words = words and self._glues
        if (special, words) not in self._readings:
            self._readings[special, words] = _reading(self._tokenizer, special=special, words=words)
        return self._readings[special, words]


def parse(text: str) -> Tokenizer:
    """A tokenizer.json's text; any damage is a ValueError with the library's reason in one line."""
    try:
        return Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as problem:  # the bare class for most damage, a panic for some, which is not an Exception
        raise ValueError(" ".join(str(problem).split())) from None


def refuse_broken_unicode(text: str, what: str) -> None:
    """Half a surrogate pair (from a JSON escape or a misread command line) has no UTF-8 form, hence no ids."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as problem:
        place = f"character {problem.start + 1}"
        raise InputError(f"{what}: not valid Unicode at {place} (a lone surrogate); remove or repair it") from None


def _framed(found: Encoding) -> Framed:
    return Framed(found.ids, found.type_ids, found.offsets, found.word_ids, found.sequence_ids)


def _limits(tokenizer: Tokenizer) -> dict[str, object]:
    if tokenizer.padding is None and tokenizer.truncation is None:
        return {}
    whole = json.loads(tokenizer.to_str())
    return {name: whole[name] for name in ("truncation", "padding")}


def _reading(tokenizer: Tokenizer, *, special: bool, words: bool) -> Tokenizer:
    """A copy that recognises special tokens, or in which no text can spell one; with a space before each given word."""
    whole = json.loads(tokenizer.to_str())
    if not special:
        _hide(whole)
    if words:
        _space(whole["pre_tokenizer"])
        _space(whole["post_processor"])
    copy = Tokenizer.from_str(json.dumps(whole))
    copy.encode_special_tokens = not special
    return copy


def _hide(whole: dict[str, Any]) -> None:
    """Renames the special tokens in the model's own vocabulary; their ids stay, and so does the template."""
    model = whole["model"]
    if model["type"] == "BPE":  # reaches a token through merges only, and none of them makes a special one
        return
    # By name the model looks up only what it says for an unknown word; that name may as well mean itself.
    kept = model.get("unk_token")
    specials = [token for token in whole["added_tokens"] if token["special"] and token["content"] != kept]
    hidden = {token["content"]: _HIDDEN + token["content"] for token in specials}
    if isinstance(model["vocab"], list):
        known = {piece for piece, _ in model["vocab"]}
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        known = set(model["vocab"])
        model["vocab"] = {hidden.get(piece, piece): number for piece, number in model["vocab"].items()}
    for token in specials:
        if token["content"] in known:
            token["content"] = hidden[token["content"]]


def _space(part: Any) -> None:
    """Byte-level BPE writes a word's space into the word: given words are read as they stand inside a sentence."""
    if isinstance(part, dict):
        if "add_prefix_space" in part:
            part["add_prefix_space"] = True
        for inner in part.values():
            _space(inner)
    elif isinstance(part, list):
        for inner in part:
            _space(inner)
