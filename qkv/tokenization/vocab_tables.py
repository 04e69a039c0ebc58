"""What pretraining asks about a vocabulary: which tokens are structure, go on with a word, end a sentence."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from qkv.errors import InputError
from qkv.tokenization.backend import FastBackend
from qkv.tokenization.tokenizer import Tokenizer

BoolArray = npt.NDArray[np.bool_]

_SENTINEL = re.compile(r"<extra_id_(\d+)>")
_SENTENCE_END = re.compile(r"[.!?。！？…]+[\"'”’»)\]]*")
_SPACES = "ĠĊĉč"  # how byte-level BPE writes space, line feed, tab and carriage return


@dataclass(frozen=True, eq=False)
class VocabTables:
    """Tables over a vocabulary of V tokens."""

    is_special: BoolArray  # [V] structure, never text: not masked, not asked for, not put in
    mask_id: int | None = None  # the token that stands for what is to be restored
    is_sentence_end: BoolArray | None = None  # [V] ends a sentence
    is_subword_continuation: BoolArray | None = None  # [V] belongs to the word of the token before; None: this vocabulary cannot tell
    sentinel_ids: tuple[int, ...] = ()  # T5's, first one first

    @cached_property
    def text_ids(self) -> npt.NDArray[np.int64]:
        """The ids of all tokens that are text."""
        return np.flatnonzero(~self.is_special)

    def check_ids(self, ids: npt.NDArray[np.int64]) -> None:
        if len(ids) and not 0 <= ids.min() <= ids.max() < len(self.is_special):
            invalid_id = ids.min() if ids.min() < 0 else ids.max()
            raise InputError(f"token {invalid_id} is none of the vocabulary's {len(self.is_special)}; tokenise the text again")


def build_vocab_tables(tokenizer: Tokenizer) -> VocabTables:
    """The tables of a tokeniser's vocabulary."""
    backend = tokenizer.backend
    tokens = [backend.id_to_token(token_id) for token_id in range(tokenizer.vocab_size)]
    special_tokens = {*backend.special_tokens, None}  # a number that no token has is never put into a text
    is_special = np.array([token in special_tokens for token in tokens])
    is_special[[token_id for token_id in tokenizer.special_ids.values() if token_id < len(tokens)]] = True
    texts = [(token or "").lstrip("▁" + _SPACES).removeprefix("##").removesuffix("</w>") for token in tokens]
    is_sentence_end = np.array([_SENTENCE_END.fullmatch(text) is not None for text in texts]) & ~is_special
    matches = ((_SENTINEL.fullmatch(token or ""), token_id) for token_id, token in enumerate(tokens))
    sentinels = sorted((int(match[1]), token_id) for match, token_id in matches if match)
    return VocabTables(is_special, tokenizer.mask_id, is_sentence_end, _subword_continuations(tokenizer, tokens), tuple(sentinel_id for _, sentinel_id in sentinels))


def _subword_continuations(tokenizer: Tokenizer, tokens: list[str | None]) -> BoolArray | None:
    """By what a vocabulary puts before a token: "##" inside a word, or "Ġ" or "▁" at its beginning.

    A full stop that follows a word without a space goes with it in the latter two, as in fairseq.
    """
    if not isinstance(tokenizer.backend, FastBackend):
        return np.array([not (token or "").startswith("▁") for token in tokens])
    raw_json = json.loads(tokenizer.backend.to_json())
    model, pre_tokenizer = raw_json["model"], json.dumps(raw_json["pre_tokenizer"])
    if model["type"] == "WordLevel":
        return np.zeros(len(tokens), dtype=np.bool_)
    if model["type"] == "WordPiece":
        return np.array([(token or "").startswith(model["continuing_subword_prefix"]) for token in tokens])
    word_prefixes = _SPACES if "ByteLevel" in pre_tokenizer else "▁" if "Metaspace" in pre_tokenizer else ""
    return np.array([not (token or " ").startswith(tuple(word_prefixes)) for token in tokens]) if word_prefixes else None
