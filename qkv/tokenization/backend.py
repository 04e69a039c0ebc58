"""The interface between `Tokenizer` and the library that splits texts, and its implementation with `tokenizers`.

A text never contains special tokens, unless a caller sets `parse_special_tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Encoding as HFEncoding
from tokenizers import Tokenizer, decoders

from qkv.errors import InputError
from qkv.files import parse_json
from qkv.tokenization.checks import call_library, call_quietly, check_tokenizer_json, probe

# a text, or a text that is split into words already
TextInput = str | Sequence[str]

# Prefix of special tokens in a vocabulary in which text is looked up: no pre-tokenizer leaves a space in a word.
_ESCAPE_PREFIX = "\x00 "


@dataclass(frozen=True)
class Encoding:
    """A model input such as [CLS] a [SEP] b [SEP]; the five lists have the same length."""

    ids: list[int]
    """Token ids."""
    token_type_ids: list[int]
    """Token type of each token: which segment embedding it gets (BERT)."""
    offsets: list[tuple[int, int]]
    """Start and end character of each token in its text, or in its word if the text was given as words."""
    word_ids: list[int | None]
    """Word of its text that each token belongs to; None for added special tokens."""
    sequence_ids: list[int | None]
    """0 for tokens of the text, 1 for those of the second text, None for added special tokens."""


class TokenizerBackend(Protocol):
    """Splits texts for a `Tokenizer`; safe to use from several threads."""

    hf_class: str
    """Tokenizer class of Hugging Face for a saved checkpoint."""
    rewrites_words: bool
    """Whether a token can change the text of the word before it: "do n't" becomes "don't"."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_tokens(self) -> list[str]: ...

    def encode_ids(self, text: str) -> list[int]: ...

    def encode_ids_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def encode(
        self, text: TextInput, pair: TextInput | None, *, add_special_tokens: bool, parse_special_tokens: bool
    ) -> Encoding: ...

    def encode_batch(
        self, inputs: Sequence[str | tuple[str, str]], *, parse_special_tokens: bool
    ) -> list[Encoding]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def display_token(self, token_id: int) -> str: ...

    def token_to_id(self, token: str) -> int | None: ...

    def id_to_token(self, token_id: int) -> str | None: ...


class FastBackend:
    """A backend that uses a `tokenizers.Tokenizer`.

    Recognizing special tokens and adding a space before words are settings of the library's object. Each combination is
    a copy of its own, made when it is first needed, so that threads do not share changing settings.
    """

    hf_class = "PreTrainedTokenizerFast"

    def __init__(self, tokenizer: Tokenizer, num_ids: int = 0) -> None:
        """Wrap a tokenizer of the library.

        Args:
            tokenizer: the tokenizer.
            num_ids: its largest id plus one, if that may exceed the number of its tokens.
        """
        self._num_ids = num_ids
        # A file may define padding and truncation: they are written back with the file, but not applied here.
        self._truncation_and_padding = _truncation_and_padding(tokenizer)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        # not part of the JSON, so it is set here, after training, loading and unpickling alike
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.rewrites_words = isinstance(tokenizer.decoder, decoders.WordPiece)
        added_tokens = tokenizer.get_added_tokens_decoder()
        self._special_tokens = {token_id: token.content for token_id, token in added_tokens.items() if token.special}
        pre_tokenizer = tokenizer.pre_tokenizer
        state = b"" if pre_tokenizer is None else pre_tokenizer.__getstate__()
        self._adds_no_prefix_space = b'"add_prefix_space":false' in state
        self._variants = {(False, False): tokenizer}
        if self._text_can_spell_special():
            self._variants[False, False] = _make_variant(tokenizer, parse_special_tokens=False, pretokenized=False)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return FastBackend.from_json, (self.to_json(),)

    @classmethod
    def from_json(cls, text: str, raw_json: Any = None, location: str = "tokenizer.json") -> FastBackend:
        """Parse and check the content of a tokenizer.json.

        Args:
            text: the content.
            raw_json: the content as a JSON value, if it was parsed already.
            location: name of the file in messages.
        """
        raw_json = parse_json(text, location) if raw_json is None else raw_json
        num_ids = check_tokenizer_json(raw_json, location)
        tokenizer = parse_tokenizer_json(text, location)
        probe(tokenizer.encode, location)
        return cls(tokenizer, num_ids)

    def to_json(self) -> str:
        """Return the content of a tokenizer.json."""
        text = str(self._tokenizer.to_str(pretty=True))
        if not self._truncation_and_padding:
            return text
        return json.dumps({**json.loads(text), **self._truncation_and_padding}, ensure_ascii=False, indent=2)

    @property
    def vocab_size(self) -> int:
        return max(self._num_ids, int(self._tokenizer.get_vocab_size(with_added_tokens=True)))

    @property
    def special_tokens(self) -> list[str]:
        return list(self._special_tokens.values())

    def encode_ids(self, text: str) -> list[int]:
        encoding = call_library(self._variant(False, False).encode, text, add_special_tokens=False)
        return list(encoding.ids)

    def encode_ids_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encode_batch = self._variant(False, False).encode_batch_fast
        encodings = call_library(encode_batch, list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode(
        self, text: TextInput, pair: TextInput | None, *, add_special_tokens: bool, parse_special_tokens: bool
    ) -> Encoding:
        pretokenized = not isinstance(text, str)
        tokenizer = self._variant(parse_special_tokens, pretokenized)
        text_input, pair_input = (
            value if value is None or isinstance(value, str) else list(value) for value in (text, pair)
        )
        options = {"is_pretokenized": pretokenized, "add_special_tokens": add_special_tokens}
        return _to_encoding(call_library(tokenizer.encode, text_input, pair_input, **options))

    def encode_batch(self, inputs: Sequence[str | tuple[str, str]], *, parse_special_tokens: bool) -> list[Encoding]:
        encodings = call_library(self._variant(parse_special_tokens, False).encode_batch, list(inputs))
        return [_to_encoding(encoding) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return str(call_library(self._tokenizer.decode, list(ids), skip_special_tokens=True))

    def display_token(self, token_id: int) -> str:
        token = self.id_to_token(token_id)
        if token is None:
            return f"<{token_id}>"
        if token_id in self._special_tokens:
            return token
        if isinstance(self._tokenizer.decoder, decoders.Metaspace):
            return token.replace("▁", " ")
        text = str(call_library(self._tokenizer.decode, [token_id], skip_special_tokens=False))
        # part of a character (byte-level BPE may split one) has no text of its own; its name is shown instead
        return text if text and "\ufffd" not in text else token

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    def _text_can_spell_special(self) -> bool:
        """Return whether a text can contain a special token: Unigram and WordLevel look up pieces by name."""
        unk_token = getattr(self._tokenizer.model, "unk_token", None)
        tokens = [token for token in self.special_tokens if token != unk_token]
        # one at a time: a batch would start the library's threads, which make forking unsafe
        return any(
            self.token_to_id(token)
            in call_library(self._tokenizer.encode, f"a {token} a", add_special_tokens=False).ids
            for token in tokens
        )

    def _variant(self, parse_special_tokens: bool, pretokenized: bool) -> Tokenizer:
        key = (parse_special_tokens, pretokenized and self._adds_no_prefix_space)
        if key not in self._variants:
            self._variants[key] = _make_variant(self._tokenizer, parse_special_tokens=key[0], pretokenized=key[1])
        return self._variants[key]


def parse_tokenizer_json(text: str, location: str) -> Tokenizer:
    """Parse the content of a tokenizer.json."""
    try:
        return call_quietly(Tokenizer.from_str, text)
    except ValueError as problem:
        raise InputError(f"{location}: damaged or not a tokenizer.json ({problem}); copy it again") from None


def check_unicode(text: str, description: str) -> None:
    """Refuse a lone surrogate (from a JSON escape or a misread command line), which has no UTF-8 form."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as problem:
        reason = f"not valid Unicode at character {problem.start + 1} (a lone surrogate)"
        raise InputError(f"{description}: {reason}; remove or repair it") from None


def _to_encoding(encoding: HFEncoding) -> Encoding:
    return Encoding(encoding.ids, encoding.type_ids, encoding.offsets, encoding.word_ids, encoding.sequence_ids)


def _truncation_and_padding(tokenizer: Tokenizer) -> dict[str, object]:
    if tokenizer.padding is None and tokenizer.truncation is None:
        return {}
    raw_json = json.loads(tokenizer.to_str())
    return {key: raw_json[key] for key in ("truncation", "padding")}


def _make_variant(tokenizer: Tokenizer, *, parse_special_tokens: bool, pretokenized: bool) -> Tokenizer:
    """Return a copy that recognizes special tokens in texts or not, and that adds a space before each word or not."""
    raw_json = json.loads(tokenizer.to_str())
    if not parse_special_tokens:
        _escape_special_tokens(raw_json)
    if pretokenized:
        _add_prefix_spaces(raw_json["pre_tokenizer"])
        _add_prefix_spaces(raw_json["post_processor"])
    copy = parse_tokenizer_json(json.dumps(raw_json), "the tokenizer")
    copy.encode_special_tokens = not parse_special_tokens
    return copy


def _escape_special_tokens(raw_json: dict[str, Any]) -> None:
    """Rename the special tokens in the model's vocabulary, so that no text matches them; their ids stay."""
    model = raw_json["model"]
    if model["type"] == "BPE":  # finds tokens through merges only, and no merge results in a special token
        return
    # the model looks up its unknown token by name, so that one keeps its name
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
    """Set `add_prefix_space` in all components, so that given words are encoded like words inside a sentence."""
    if isinstance(node, dict):
        if "add_prefix_space" in node:
            node["add_prefix_space"] = True
        for child in node.values():
            _add_prefix_spaces(child)
    elif isinstance(node, list):
        for child in node:
            _add_prefix_spaces(child)
