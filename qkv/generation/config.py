"""Settings of text generation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from qkv.errors import InputError


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How a model generates text: greedily, by beam search or by sampling."""

    num_beams: int = 1
    """Beam width; 1 is greedy search."""

    length_penalty: float = 1.0
    """Beams are ranked by log-probability / length ** length_penalty."""

    unfinished_beams: Literal["last", "ranked"] | None = None
    """Rank of outputs that reach the maximum length without EOS: after all finished ones ("last"), or by their score
    ("ranked", as in transformers); None: "ranked" for continuations of a prompt, else "last"."""

    n_best: int = 1
    """Number of outputs per input."""

    do_sample: bool = False
    """Sample from the model's distribution instead of searching."""

    temperature: float = 1.0
    """Divisor of the logits before sampling: below 1 sharpens, above 1 flattens the distribution."""

    top_k: int | None = None
    """Sample from the k most probable tokens only; None: from all."""

    top_p: float | None = None
    """Sample from the smallest set of tokens with this total probability (nucleus sampling); None: from all."""

    seed: int = 0
    """Seed of sampling; together with an input's index it determines the output."""

    max_new_tokens: int | None = None
    """Maximum number of generated tokens; None: twice the source length plus 16, or 64 after a prompt."""

    batch_tokens: int = 8192
    """Tokens per batch."""

    on_too_long: Literal["refuse", "truncate"] = "refuse"
    """Refuse or truncate an input that exceeds the model's maximum length."""

    on_unknown: Literal["refuse", "replace"] = "refuse"
    """Refuse an input with a token that is not in the vocabulary, or replace the token by the unknown token."""

    parse_special_tokens: bool = False
    """Read special tokens that are spelled out in a text, such as T5's <extra_id_0>, as tokens."""


def validate(config: GenerationConfig) -> None:
    """Refuse values out of range."""
    for name in ("num_beams", "n_best", "batch_tokens"):
        if getattr(config, name) < 1:
            raise InputError(f"{name} must be at least 1, not {getattr(config, name)}")
    if config.max_new_tokens is not None and config.max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be at least 1, not {config.max_new_tokens}")
    if not -10 <= config.length_penalty <= 10:
        raise InputError(f"length_penalty must be between -10 and 10, not {config.length_penalty}")
    if not 0 < config.temperature < math.inf:
        raise InputError(
            f"temperature must be above 0, not {config.temperature}; for the most probable output do not sample"
        )
    if config.top_k is not None and config.top_k < 1:
        raise InputError(f"top_k must be at least 1, not {config.top_k}")
    if config.top_p is not None and not 0 < config.top_p <= 1:
        raise InputError(f"top_p must be above 0 and at most 1, not {config.top_p}")
    if config.on_too_long not in ("refuse", "truncate"):
        raise InputError(f"on_too_long is refuse or truncate, not '{config.on_too_long}'")
    if config.unfinished_beams not in ("last", "ranked", None):
        raise InputError(f"unfinished_beams is last or ranked, not '{config.unfinished_beams}'")


def validate_search(config: GenerationConfig) -> None:
    """Refuse values out of range, and more outputs than beams."""
    validate(config)
    if not config.do_sample and config.n_best > config.num_beams:
        raise InputError(
            f"n_best={config.n_best} needs at least as many beams (num_beams={config.n_best}), or sampling"
        )
