"""How outputs are looked for, and what comes back for an input."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from qkv.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How outputs are searched for."""

    beams: int = 1  # 1: greedy
    length_penalty: float = 1.0
    # what the limit cut short comes last of a beam's outputs, or where its rank puts it, as with transformers;
    # None: by rank where a prompt is continued, for there an end is no aim
    unfinished: Literal["last", "ranked"] | None = None
    best: int = 1  # how many outputs an input gets
    sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    limit: int | None = None  # longest output in tokens; None: twice the input and a few more
    batch_tokens: int = 8192
    too_long: Literal["refuse", "truncate"] = "refuse"
    unknown: Literal["refuse", "replace"] = "refuse"
    special: bool = False  # special tokens in a text, such as T5's <extra_id_0>, are read as such and not as text
    # what stands for a word of several tokens; None: as the tagger was trained, else the first
    word: Literal["first", "mean"] | None = None
    threshold: float = 0.5  # the probability from which on a label counts, where several may


@dataclass(frozen=True)
class Part:
    """A stretch of an input that something is said about: a tagged word, an answer."""

    text: str
    label: str
    score: float  # log-probability
    begin: int  # characters of the input
    end: int


@dataclass(frozen=True)
class Prediction:
    """One output for one input: a text that was written, a label, a number, the words with their tags, an answer."""

    text: str
    score: float  # log-probability; of a written text the sum over its tokens; of a number the number itself
    finished: bool = True  # False: the limit came before the end of what was written
    parts: tuple[Part, ...] = ()


def check(how: Decoding) -> None:
    """Refuses settings that contradict each other or mean nothing."""
    for name in ("beams", "best", "batch_tokens"):
        if getattr(how, name) < 1:
            raise InputError(f"{name} must be at least 1, not {getattr(how, name)}")
    if how.limit is not None and how.limit < 1:
        raise InputError(f"limit must be at least 1, not {how.limit}")
    if not -10 <= how.length_penalty <= 10:
        raise InputError(f"length_penalty must lie between -10 and 10, not {how.length_penalty}")
    if not 0 < how.temperature < math.inf:
        raise InputError(f"temperature must be above 0, not {how.temperature}; for the likeliest output do not sample")
    if how.top_k is not None and how.top_k < 1:
        raise InputError(f"top_k must be at least 1, not {how.top_k}")
    if how.top_p is not None and not 0 < how.top_p <= 1:
        raise InputError(f"top_p must lie above 0 and at most at 1, not {how.top_p}")
    if how.unfinished not in ("last", "ranked", None):
        raise InputError(f"unfinished is last or ranked, not '{how.unfinished}'")
    if not 0 <= how.threshold <= 1:
        raise InputError(f"threshold is a probability, from 0 to 1, not {how.threshold}")
    if how.word not in ("first", "mean", None):
        raise InputError(f"word is first or mean, not '{how.word}'")


def check_search(how: Decoding) -> None:
    """The same, for what writes."""
    check(how)
    if not how.sample and how.best > max(how.beams, 1):
        raise InputError(f"best={how.best} needs as many beams (beams={how.best}) or sampling")
