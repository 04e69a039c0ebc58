"""How outputs are looked for, and what comes back for an input."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from qkv.errors import InputError


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How outputs are searched for."""

    num_beams: int = 1  # 1: greedy
    length_penalty: float = 1.0
    # what the limit cut short comes last of a beam's outputs, or where its rank puts it, as with transformers;
    # None: by rank where a prompt is continued, for there an end is no aim
    unfinished_beams: Literal["last", "ranked"] | None = None
    n_best: int = 1  # how many outputs an input gets
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    max_new_tokens: int | None = None  # longest output in tokens; None: twice the input and a few more
    batch_tokens: int = 8192
    on_too_long: Literal["refuse", "truncate"] = "refuse"
    on_unknown: Literal["refuse", "replace"] = "refuse"
    parse_special_tokens: bool = False  # special tokens in a text, such as T5's <extra_id_0>, are read as such and not as text
    # what stands for a word of several tokens; None: as the tagger was trained, else the first
    subword_pooling: Literal["first", "mean"] | None = None
    threshold: float = 0.5  # the probability from which on a label counts, where several may


@dataclass(frozen=True)
class PredictedSpan:
    """A stretch of an input that something is said about: a tagged word, an answer."""

    text: str
    label: str
    score: float  # log-probability
    start: int  # characters of the input
    end: int


@dataclass(frozen=True)
class Prediction:
    """One output for one input: a text that was written, a label, a number, the words with their tags, an answer."""

    text: str
    score: float  # log-probability; of a written text the sum over its tokens; of a number the number itself
    finished: bool = True  # False: the limit came before the end of what was written
    spans: tuple[PredictedSpan, ...] = ()


def validate(config: GenerationConfig) -> None:
    """Refuses settings that contradict each other or mean nothing."""
    for name in ("num_beams", "n_best", "batch_tokens"):
        if getattr(config, name) < 1:
            raise InputError(f"{name} must be at least 1, not {getattr(config, name)}")
    if config.max_new_tokens is not None and config.max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be at least 1, not {config.max_new_tokens}")
    if not -10 <= config.length_penalty <= 10:
        raise InputError(f"length_penalty must lie between -10 and 10, not {config.length_penalty}")
    if not 0 < config.temperature < math.inf:
        raise InputError(f"temperature must be above 0, not {config.temperature}; for the likeliest output do not sample")
    if config.top_k is not None and config.top_k < 1:
        raise InputError(f"top_k must be at least 1, not {config.top_k}")
    if config.top_p is not None and not 0 < config.top_p <= 1:
        raise InputError(f"top_p must lie above 0 and at most at 1, not {config.top_p}")
    if config.unfinished_beams not in ("last", "ranked", None):
        raise InputError(f"unfinished_beams is last or ranked, not '{config.unfinished_beams}'")
    if not 0 <= config.threshold <= 1:
        raise InputError(f"threshold is a probability, from 0 to 1, not {config.threshold}")
    if config.subword_pooling not in ("first", "mean", None):
        raise InputError(f"subword_pooling is first or mean, not '{config.subword_pooling}'")


def validate_search(config: GenerationConfig) -> None:
    """The same, for what writes."""
    validate(config)
    if not config.do_sample and config.n_best > max(config.num_beams, 1):
        raise InputError(f"n_best={config.n_best} needs as many beams (num_beams={config.n_best}) or sampling")
