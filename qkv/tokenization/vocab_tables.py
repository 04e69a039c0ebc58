"""Tables of a vocabulary for masking and noise: special tokens, subword continuations, ends of sentences."""

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
_SPACES = "ĠĊĉč"  # space, line feed, tab and carriage return in byte-level BPE


@dataclass(frozen=True, eq=False)
class VocabTables:
    """Tables over a vocabulary of V tokens."""

    is_special: BoolArray  # [V] special tokens: never masked, predicted or inserted as random tokens
    mask_id: int | None = None
    is_sentence_end: BoolArray | None = None  # [V] tokens that end a sentence
    # [V] tokens that belong to the same word as the token before; None: the vocabulary does not mark words
    is_subword_continuation: BoolArray | None = None
    sentinel_ids: tuple[int, ...] = ()  # T5's sentinels, starting with <extra_id_0>

    @cached_property
    def text_ids(self) -> npt.NDArray[np.int64]:
        """Ids of all tokens that are not special."""
        return np.flatnonzero(~self.is_special)

    def check_ids(self, ids: npt.NDArray[np.int64]) -> None:
        """Refuse ids outside the vocabulary."""
        if len(ids) and not 0 <= ids.min() <= ids.max() < len(self.is_special):
            invalid_id = ids.min() if ids.min() < 0 else ids.max()
            size = len(self.is_special)
            raise InputError(
                f"token id {invalid_id} is outside the vocabulary of {size} tokens; tokenize the text again"
            )


def build_vocab_tables(tokenizer: Tokenizer) -> VocabTables:
    """Return the tables of a tokenizer's vocabulary."""
    backend = tokenizer.backend
    tokens = [backend.id_to_token(token_id) for token_id in range(tokenizer.vocab_size)]
    special_tokens = {*backend.special_tokens, None}  # None: an id without a token is never inserted into a text
    is_special = np.array([token in special_tokens for token in tokens])
    is_special[[token_id for token_id in tokenizer.special_ids.values() if token_id < len(tokens)]] = True
    texts = [(token or "").lstrip("▁" + _SPACES).removeprefix("##").removesuffix("</w>") for token in tokens]
    is_sentence_end = np.array([_SENTENCE_END.fullmatch(text) is not None for text in texts]) & ~is_special
    matches = ((_SENTINEL.fullmatch(token or ""), token_id) for token_id, token in enumerate(tokens))
    sentinels = sorted((int(match[1]), token_id) for match, token_id in matches if match)
    return VocabTables(
        is_special,
        tokenizer.mask_id,
        is_sentence_end,
        _subword_continuations(tokenizer, tokens),
        tuple(sentinel_id for _, sentinel_id in sentinels),
    )


def _subword_continuations(tokenizer: Tokenizer, tokens: list[str | None]) -> BoolArray | None:
    """Return which tokens continue a word: those with "##", or those without "Ġ" or "▁", depending on the vocabulary.

    With "Ġ" and "▁", punctuation that follows a word without a space belongs to the word, as in fairseq.
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
    if not word_prefixes:
        return None
    return np.array([not (token or " ").startswith(tuple(word_prefixes)) for token in tokens])
