"""How text is cut into ids: what a `Tokenizer` asks of the library below it, and the `tokenizers` side of the answer.

Special tokens are structure: unless a caller asks for them, no text can spell one, whatever the library makes of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Encoding as HFEncoding
from tokenizers import Tokenizer, decoders

from qkv.errors import InputError

# A text, or a text that somebody has already cut into words.
TextInput = str | Sequence[str]

# Before a special token's name in a vocabulary that text is looked up in: no pre-tokeniser leaves a space in a word.
_ESCAPE_PREFIX = "\x00 "


@dataclass(frozen=True)
class Encoding:
    """One input of a model as its family writes it, e.g. [CLS] a [SEP] b [SEP]; the five lists are of one length."""

    ids: list[int]
    # which of the model's segment vectors each token takes (BERT's token types)
    token_type_ids: list[int]
    # the characters that a token stands for, in the text that `sequence_ids` names or, of given words, in its word
    offsets: list[tuple[int, int]]
    # which word of its part a token belongs to; an added token belongs to none
    word_ids: list[int | None]
    # 0 for the text, 1 for the pair, None for what the template added
    sequence_ids: list[int | None]


class TokenizerBackend(Protocol):
    """What cuts text for a `Tokenizer`. Any number of threads may use one."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_tokens(self) -> list[str]: ...

    def encode_ids(self, text: str) -> list[int]: ...

    def encode_ids_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def encode(self, text: TextInput, pair: TextInput | None, *, add_special_tokens: bool, parse_special_tokens: bool) -> Encoding: ...

    def encode_batch(self, inputs: Sequence[str | tuple[str, str]], *, parse_special_tokens: bool) -> list[Encoding]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def display_token(self, token_id: int) -> str: ...

    def token_to_id(self, token: str) -> int | None: ...

    def id_to_token(self, token_id: int) -> str | None: ...


class FastBackend:
    """A `tokenizers.Tokenizer` and its other readings of a text.

    Whether special tokens are recognised and whether words take a space are settings of the library's object, shared by
    all who hold it. So each combination is an object of its own, made when it is first asked for.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        # A foreign file may pad or cut by itself: kept for whoever gets the file back, never done here.
        self._truncation_and_padding = _truncation_and_padding(tokenizer)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        # Not part of the JSON, so it is set on every way in: training, loading, unpickling.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        added_tokens = tokenizer.get_added_tokens_decoder()
        self._special_tokens = {token_id: token.content for token_id, token in added_tokens.items() if token.special}
        pre_tokenizer = tokenizer.pre_tokenizer
        self._adds_no_prefix_space = pre_tokenizer is not None and b'"add_prefix_space":false' in pre_tokenizer.__getstate__()
        default_variant = tokenizer if not self._text_can_spell_special() else _make_variant(tokenizer, parse_special_tokens=False, pretokenized=False)
        self._variants = {(False, False): default_variant}

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return FastBackend.from_json, (self.to_json(),)

    @classmethod
    def from_json(cls, text: str) -> FastBackend:
        return cls(parse_tokenizer_json(text))

    def to_json(self) -> str:
        """tokenizers' own JSON, complete: what `parse_tokenizer_json` takes and what a Hugging Face folder holds."""
        text = str(self._tokenizer.to_str(pretty=True))
        return json.dumps({**json.loads(text), **self._truncation_and_padding}, ensure_ascii=False, indent=2) if self._truncation_and_padding else text

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def special_tokens(self) -> list[str]:
        return list(self._special_tokens.values())

    def encode_ids(self, text: str) -> list[int]:
        return list(self._variant(False, False).encode(text, add_special_tokens=False).ids)

    def encode_ids_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._variant(False, False).encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode(self, text: TextInput, pair: TextInput | None, *, add_special_tokens: bool, parse_special_tokens: bool) -> Encoding:
        pretokenized = not isinstance(text, str)
        tokenizer = self._variant(parse_special_tokens, pretokenized)
        text_input, pair_input = (value if value is None or isinstance(value, str) else list(value) for value in (text, pair))
        return _to_encoding(tokenizer.encode(text_input, pair_input, is_pretokenized=pretokenized, add_special_tokens=add_special_tokens))

    def encode_batch(self, inputs: Sequence[str | tuple[str, str]], *, parse_special_tokens: bool) -> list[Encoding]:
        return [_to_encoding(encoding) for encoding in self._variant(parse_special_tokens, False).encode_batch(list(inputs))]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def display_token(self, token_id: int) -> str:
        token = self.id_to_token(token_id)
        if token is None:
            return f"<{token_id}>"
        if token_id in self._special_tokens:
            return token
        if isinstance(self._tokenizer.decoder, decoders.Metaspace):
            return token.replace("▁", " ")
        text = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        # Half a character (byte-level BPE may cut inside one) has no text of its own; its raw name tells it apart.
        return text if text and "\ufffd" not in text else token

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    def _text_can_spell_special(self) -> bool:
        """Whether some text is a special token for the model itself: Unigram and whole words are looked up by name."""
        unk_token = getattr(self._tokenizer.model, "unk_token", None)
        tokens = [token for token in self.special_tokens if token != unk_token]
        # One by one: a batch would start the library's threads, and a process that has them does not fork well.
        return any(
            self.token_to_id(token) in self._tokenizer.encode(f"a {token} a", add_special_tokens=False).ids for token in tokens
        )

    def _variant(self, parse_special_tokens: bool, pretokenized: bool) -> Tokenizer:
        pretokenized = pretokenized and self._adds_no_prefix_space
        if (parse_special_tokens, pretokenized) not in self._variants:
            self._variants[parse_special_tokens, pretokenized] = _make_variant(self._tokenizer, parse_special_tokens=parse_special_tokens, pretokenized=pretokenized)
        return self._variants[parse_special_tokens, pretokenized]


def parse_tokenizer_json(text: str) -> Tokenizer:
    """A tokenizer.json's text; any damage is a ValueError with the library's reason in one line."""
    try:
        return Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as problem:  # the bare class for most damage, a panic for some, which is not an Exception
        raise ValueError(" ".join(str(problem).split())) from None


def check_unicode(text: str, description: str) -> None:
    """Half a surrogate pair (from a JSON escape or a misread command line) has no UTF-8 form, hence no ids."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as problem:
        position = f"character {problem.start + 1}"
        raise InputError(f"{description}: not valid Unicode at {position} (a lone surrogate); remove or repair it") from None


def _to_encoding(encoding: HFEncoding) -> Encoding:
    return Encoding(encoding.ids, encoding.type_ids, encoding.offsets, encoding.word_ids, encoding.sequence_ids)


def _truncation_and_padding(tokenizer: Tokenizer) -> dict[str, object]:
    if tokenizer.padding is None and tokenizer.truncation is None:
        return {}
    raw_json = json.loads(tokenizer.to_str())
    return {key: raw_json[key] for key in ("truncation", "padding")}


def _make_variant(tokenizer: Tokenizer, *, parse_special_tokens: bool, pretokenized: bool) -> Tokenizer:
    """A copy that recognises special tokens, or in which no text can spell one; with a space before each given word."""
    raw_json = json.loads(tokenizer.to_str())
    if not parse_special_tokens:
        _escape_special_tokens(raw_json)
    if pretokenized:
        _add_prefix_spaces(raw_json["pre_tokenizer"])
        _add_prefix_spaces(raw_json["post_processor"])
    copy = Tokenizer.from_str(json.dumps(raw_json))
    copy.encode_special_tokens = not parse_special_tokens
    return copy


def _escape_special_tokens(raw_json: dict[str, Any]) -> None:
    """Renames the special tokens in the model's own vocabulary; their ids stay, and so does the template."""
    model = raw_json["model"]
    if model["type"] == "BPE":  # reaches a token through merges only, and none of them makes a special one
        return
    # By name the model looks up only what it says for an unknown word; that name may as well mean itself.
    unk_token = model.get("unk_token")
    special_tokens = [token for token in raw_json["added_tokens"] if token["special"] and token["content"] != unk_token]
    escaped = {token["content"]: _ESCAPE_PREFIX + token["content"] for token in special_tokens}
    if isinstance(model["vocab"], list):
        vocab_tokens = {piece for piece, _ in model["vocab"]}
        model["vocab"] = [[escaped.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        vocab_tokens = set(model["vocab"])
        model["vocab"] = {escaped.get(piece, piece): token_id for piece, token_id in model["vocab"].items()}
    for token in special_tokens:
        if token["content"] in vocab_tokens:
            token["content"] = escaped[token["content"]]


def _add_prefix_spaces(node: Any) -> None:
    """Byte-level BPE writes a word's space into the word: given words are read as they stand inside a sentence."""
    if isinstance(node, dict):
        if "add_prefix_space" in node:
            node["add_prefix_space"] = True
        for child in node.values():
            _add_prefix_spaces(child)
    elif isinstance(node, list):
        for child in node:
            _add_prefix_spaces(child)
