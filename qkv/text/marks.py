"""What pretraining asks about a vocabulary: which tokens are structure, go on with a word, end a sentence."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from qkv.errors import InputError
from qkv.text.engine import Fast
from qkv.text.tokeniser import Tokeniser

Bools = npt.NDArray[np.bool_]

_SENTINEL = re.compile(r"<extra_id_(\d+)>")
_STOP = re.compile(r"[.!?。！？…]+[\"'”’»)\]]*")
_SPACES = "ĠĊĉč"  # how byte-level BPE writes space, line feed, tab and carriage return


@dataclass(frozen=True, eq=False)
class Marks:
    """Tables over a vocabulary of V tokens."""

    special: Bools  # [V] structure, never text: not masked, not asked for, not put in
    mask: int | None = None  # the token that stands for what is to be restored
    stops: Bools | None = None  # [V] ends a sentence
    continues: Bools | None = None  # [V] belongs to the word of the token before; None: this vocabulary cannot tell
    sentinels: tuple[int, ...] = ()  # T5's, first one first

    @cached_property
    def ordinary(self) -> npt.NDArray[np.int64]:
        """The ids of all tokens that are text."""
        return np.flatnonzero(~self.special)

    def check(self, ids: npt.NDArray[np.int64]) -> None:
        if len(ids) and not 0 <= ids.min() <= ids.max() < len(self.special):
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise InputError(f"token {wrong} is none of the vocabulary's {len(self.special)}; tokenise the text again")


def marks(tokeniser: Tokeniser) -> Marks:
    """The tables of a tokeniser's vocabulary."""
    engine = tokeniser.engine
    names = [engine.name(number) for number in range(tokeniser.size)]
    structure = {*engine.specials, None}  # a number that no token has is never put into a text
    special = np.array([name in structure for name in names])
    special[[number for number in tokeniser.roles.values() if number < len(names)]] = True
    texts = [(name or "").lstrip("▁" + _SPACES).removeprefix("##").removesuffix("</w>") for name in names]
    stops = np.array([_STOP.fullmatch(text) is not None for text in texts]) & ~special
    found = ((_SENTINEL.fullmatch(name or ""), number) for number, name in enumerate(names))
    sentinels = sorted((int(match[1]), number) for match, number in found if match)
    return Marks(special, tokeniser.mask, stops, _continues(tokeniser, names), tuple(id for _, id in sentinels))


def _continues(tokeniser: Tokeniser, names: list[str | None]) -> Bools | None:
    """By what a vocabulary puts before a token: "##" inside a word, or "Ġ" or "▁" at its beginning.

    A full stop that follows a word without a space goes with it in the latter two, as in fairseq.
    """
    if not isinstance(tokeniser.engine, Fast):
        return np.array([not (name or "").startswith("▁") for name in names])
    whole = json.loads(tokeniser.engine.to_json())
    model, cut = whole["model"], json.dumps(whole["pre_tokenizer"])
    if model["type"] == "WordLevel":
        return np.zeros(len(names), dtype=np.bool_)
    if model["type"] == "WordPiece":
        return np.array([(name or "").startswith(model["continuing_subword_prefix"]) for name in names])
    begins = _SPACES if "ByteLevel" in cut else "▁" if "Metaspace" in cut else ""
    return np.array([not (name or " ").startswith(tuple(begins)) for name in names]) if begins else None
