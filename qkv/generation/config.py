"""Settings of text generation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from qkv.errors import InputError, describe_value, did_you_mean, quote
from qkv.files import parse_yaml
from qkv.limits import limit, raise_hint
from qkv.spec.check import matches_type


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How a model generates text: greedily, by beam search or by sampling. Names are those of transformers."""

    num_beams: int = 1
    """Beam width; 1 is greedy search."""

    length_penalty: float = 1.0
    """Beams are ranked by log-probability / length ** length_penalty."""

    early_stopping: bool | Literal["never"] = False
    """When a beam search ends: as soon as num_beams outputs are finished (true), when no live beam has a better score
    at its present length (false), or when none can get one at any length ("never")."""

    num_beam_groups: int = 1
    """Groups of beams that are made different from each other (diverse beam search, Vijayakumar et al. 2018)."""

    diversity_penalty: float = 0.0
    """Subtracted from the score of a token for each beam of an earlier group that chose it in the same step."""

    unfinished_beams: Literal["last", "ranked"] | None = None
    """Rank of outputs that reach the maximum length without EOS: after all finished ones ("last"), or by their score
    ("ranked", as in transformers); None: "ranked" for continuations of a prompt, else "last"."""

    coverage_penalty: float = 0.0
    """Weight of the coverage of the source by attention when beams are ranked (GNMT, Wu et al. 2016)."""

    n_best: int = 1
    """Number of outputs per input."""

    return_alignments: bool = False
    """Return the source token that each generated token attends to most."""

    do_sample: bool = False
    """Sample from the model's distribution instead of searching."""

    temperature: float = 1.0
    """Divisor of the logits before sampling: below 1 sharpens, above 1 flattens the distribution."""

    top_k: int | None = None
    """Sample from the k most probable tokens only; None: from all."""

    top_p: float | None = None
    """Sample from the smallest set of tokens with this total probability (nucleus sampling); None: from all."""

    min_p: float | None = None
    """Sample from tokens with at least this fraction of the probability of the best one; None: from all."""

    typical_p: float | None = None
    """Sample from the tokens closest to the expected information, with this total probability; None: from all."""

    seed: int = 0
    """Seed of sampling; together with an input's index it determines the output."""

    repetition_penalty: float = 1.0
    """Divisor of positive logits, and factor of negative ones, of tokens that occurred; above 1 avoids repetition."""

    no_repeat_ngram_size: int = 0
    """No n-gram of this size occurs twice; 0: any may."""

    renormalize_logits: bool = False
    """Normalize the probabilities of the next token again after the rules of this config."""

    min_new_tokens: int = 0
    """Minimum number of generated tokens before EOS."""

    max_new_tokens: int | None = None
    """Maximum number of generated tokens; None: twice the source length plus 16, or 64 after a prompt."""

    min_length: int = 0
    """Minimum number of tokens before EOS, counting the prompt or the start token."""

    max_length: int | None = None
    """Maximum number of tokens, counting the prompt or the start token; `max_new_tokens` takes precedence."""

    forced_bos_token_id: int | None = None
    """First token that an encoder-decoder generates, such as the language of multilingual models."""

    forced_eos_token_id: int | None = None
    """Last token of outputs that reach the maximum length."""

    suppress_tokens: tuple[int, ...] = ()
    """Tokens that are never generated."""

    begin_suppress_tokens: tuple[int, ...] = ()
    """Tokens that are not generated first."""

    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that are never generated."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an output in addition to the model's EOS."""

    stop_strings: tuple[str, ...] = ()
    """Texts that end an output; the output ends before them."""

    forced_prefix: str = ""
    """Text that every output begins with."""

    dtype: Literal["float32", "bf16", "int8"] | None = None
    """Numeric type of the weights: on a GPU bf16 or float32, by default bf16; on a CPU float32 or int8, by default
    float32. int8 is about twice as fast on a CPU and changes the output slightly."""

    ensemble: Literal["probabilities", "log_probabilities"] = "probabilities"
    """What several models that generate together take the mean of."""

    batch_tokens: int = 8192
    """Tokens per batch."""

    on_too_long: Literal["refuse", "truncate"] = "refuse"
    """Refuse or truncate an input that exceeds the model's maximum length."""

    on_unknown: Literal["refuse", "replace"] = "refuse"
    """Refuse an input with a token that is not in the vocabulary, or replace the token by the unknown token."""

    parse_special_tokens: bool = False
    """Read special tokens that are spelled out in a text, such as T5's <extra_id_0>, as tokens."""

    def __post_init__(self) -> None:
        for name in _LISTS:
            object.__setattr__(self, name, _as_tuples(getattr(self, name)))  # a config is hashable


# settings that are numbers: name -> (lowest value, whether it is allowed, highest value, whether it is allowed)
_BOUNDS: dict[str, tuple[float, bool, float, bool]] = {
    "batch_tokens": (1, True, math.inf, False),
    "max_new_tokens": (1, True, math.inf, False),
    "max_length": (1, True, math.inf, False),
    "min_new_tokens": (0, True, math.inf, False),
    "min_length": (0, True, math.inf, False),
    "no_repeat_ngram_size": (0, True, math.inf, False),
    "length_penalty": (-10, True, 10, True),
    "diversity_penalty": (0, True, math.inf, False),
    "coverage_penalty": (0, True, math.inf, False),
    "temperature": (0, False, math.inf, False),
    "top_k": (1, True, math.inf, False),
    "top_p": (0, False, 1, True),
    "min_p": (0, True, 1, True),
    "typical_p": (0, False, 1, True),
    "repetition_penalty": (0, False, math.inf, False),
    "seed": (0, True, 2**63, False),
}
_CHOICES: dict[str, tuple[object, ...]] = {
    "early_stopping": (False, True, "never"),
    "on_too_long": ("refuse", "truncate"),
    "on_unknown": ("refuse", "replace"),
    "unfinished_beams": ("last", "ranked", None),
    "ensemble": ("probabilities", "log_probabilities"),
    "dtype": ("float32", "bf16", "int8", None),
}
_WHOLE_NUMBERS = {field.name for field in fields(GenerationConfig) if str(field.type).startswith("int")}
_LISTS = [field.name for field in fields(GenerationConfig) if str(field.type).startswith("tuple")]
_MAX_NUMBER = 2**53  # larger whole numbers have no exact float
_TYPE_NAMES: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a text", "texts"),
    bool: ("true or false", "true or false"),
}
_SAMPLING_ONLY = ("temperature", "top_k", "top_p", "min_p", "typical_p")
_DEFAULTS = {field.name: field.default for field in fields(GenerationConfig)}


@cache
def _field_types() -> dict[str, Any]:
    return get_type_hints(GenerationConfig)


def validate(config: GenerationConfig) -> None:
    """Refuse values of another type or out of range, and numbers of beams that do not belong together."""
    _check_values(config)
    if config.num_beams % config.num_beam_groups:
        raise InputError(
            f"num_beams={config.num_beams} cannot be divided into num_beam_groups={config.num_beam_groups} equal groups"
        )
    if config.diversity_penalty and config.num_beam_groups == 1:
        raise InputError("diversity_penalty needs num_beam_groups above 1")


def _check_values(config: GenerationConfig) -> None:
    """Refuse values of another type or out of range, each by itself."""
    for name, allowed in _CHOICES.items():
        value = getattr(config, name)
        if not isinstance(value, str | bool | None) or value not in allowed:
            choices = " or ".join(str(choice).lower() for choice in allowed if choice is not None)
            raise InputError(f"{name} is {choices}, not {describe_value(value)}")
    for name, hint in _field_types().items():
        value = getattr(config, name)
        if not matches_type(value, hint):
            raise InputError(f"{name} must be {_describe_type(hint)}, not {describe_value(value)}")
        if type(value) is int and abs(value) > _MAX_NUMBER:
            raise InputError(f"{name} cannot be {describe_value(value)}")
    for name in ("num_beams", "n_best", "num_beam_groups"):
        _check_number(name, getattr(config, name), (1, True, math.inf, False))
        if getattr(config, name) > limit("beams"):
            raise InputError(f"{name}: {getattr(config, name):,} is too large; {raise_hint('beams')}")
    for name, bounds in _BOUNDS.items():
        if getattr(config, name) is not None:
            _check_number(name, getattr(config, name), bounds)
    if any(not word for word in config.bad_words_ids):
        raise InputError("bad_words_ids: a word is empty; leave it out")
    if any(not text for text in config.stop_strings):
        raise InputError("stop_strings: a stop string is empty; leave it out")


def _describe_type(hint: Any, *, plural: bool = False) -> str:
    """Return what a value of a type is called, without the None that stands for a default."""
    options = [option for option in get_args(hint) if option is not type(None)]
    if get_origin(hint) is tuple:
        return f"{'lists' if plural else 'a list'} of {_describe_type(options[0], plural=True)}"
    if options:
        return _describe_type(options[0], plural=plural)
    singular, plural_name = _TYPE_NAMES[hint]
    return plural_name if plural else singular


def _check_number(name: str, value: Any, bounds: tuple[float, bool, float, bool]) -> None:
    low, low_allowed, high, high_allowed = bounds
    kinds = int if name in _WHOLE_NUMBERS else int | float
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    above_low = is_number and (low < value or (low_allowed and value == low))
    if above_low and (value < high or (high_allowed and value == high)):
        return
    text = f"{'at least' if low_allowed else 'above'} {low:g}"
    if high < math.inf:
        text += f" and {'at most' if high_allowed else 'below'} {high:g}"
    remedy = "; for the most probable output do not sample" if name == "temperature" else ""
    raise InputError(f"{name} must be {text}, not {str(value)[:60]}{remedy}")


def validate_search(config: GenerationConfig) -> None:
    """Refuse values out of range, and settings that contradict each other or have no effect."""
    validate(config)
    if not config.do_sample and config.n_best > config.num_beams:
        raise InputError(
            f"n_best={config.n_best} needs at least as many beams (num_beams={config.n_best}), or sampling"
        )
    if config.coverage_penalty and (config.do_sample or config.num_beams == 1):
        raise InputError("coverage_penalty ranks beams; set num_beams above 1, or leave it out")
    if config.coverage_penalty and config.num_beam_groups > 1:
        raise InputError("coverage_penalty and num_beam_groups exclude each other; leave one of them out")
    if config.do_sample and config.num_beams > 1:
        raise InputError("num_beams and do_sample exclude each other; search or sample")
    if not config.do_sample:
        ignored = next((name for name in _SAMPLING_ONLY if getattr(config, name) != _DEFAULTS[name]), None)
        if ignored is not None:
            raise InputError(f"{ignored} has an effect on sampling only; set do_sample too, or leave it out")
    _check_limits(config)
    blocked = {*config.suppress_tokens, *(word[0] for word in config.bad_words_ids if len(word) == 1)}
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        if getattr(config, name) in blocked:
            raise InputError(f"{name}: token {getattr(config, name)} is forced and suppressed; leave one of them out")


def _check_limits(config: GenerationConfig) -> None:
    """Refuse a minimum number of tokens that exceeds the maximum."""
    maximum, minimums = config.max_new_tokens, {"min_new_tokens": config.min_new_tokens}
    name, room = "max_new_tokens", maximum
    if maximum is None and config.max_length is not None:  # `max_new_tokens` takes precedence
        maximum, minimums["min_length"] = config.max_length, config.min_length
        name, room = "max_length", maximum - 1  # at least one token comes before the new ones
    if maximum is None or room is None:
        return
    for minimum, value in minimums.items():
        if value > (maximum if minimum == "min_length" else room):
            raise InputError(f"{minimum}={value} exceeds {name}={maximum}; raise the latter, or lower the former")


def describe_settings(config: GenerationConfig, base: GenerationConfig, origin: str) -> str:
    """Return the settings that differ from the defaults, in one line with where they come from.

    Args:
        config: the settings in force.
        base: the settings without those of the user.
        origin: where these come from, such as the checkpoint.
    """
    by_origin: dict[str, list[str]] = {}
    for name, default in _DEFAULTS.items():
        value, base_value = getattr(config, name), getattr(base, name)
        if value != base_value or value != default:
            source = origin if value == base_value else "user"
            by_origin.setdefault(source, []).append(f"{name}={_as_yaml(value)}")
    return "; ".join(f"{', '.join(settings)} ({source})" for source, settings in by_origin.items())


def _as_yaml(value: Any) -> str:
    """Return a value as `--generation` takes it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_yaml, value))}]"
    return str(value).lower() if isinstance(value, bool) else quote(value) if isinstance(value, str) else str(value)


def parse_options(options: Sequence[str], where: str) -> dict[str, Any]:
    """Parse KEY=VALUE options as fields of a config; lists become tuples. `where` begins an error message.

    Each value is checked by itself: which settings belong together, the whole config tells.
    """
    settings: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals:
            raise InputError(f"{where}: {quote(option)} is not KEY=VALUE, such as no_repeat_ngram_size=3")
        if name not in _DEFAULTS:
            raise InputError(f"{where}: no setting {quote(name)}; {did_you_mean(name, _DEFAULTS)}")
        value = parse_yaml(text, f"{where} {name}")
        settings[name] = _as_tuples([value] if name == "stop_strings" and isinstance(value, str) else value)
    _check_values(GenerationConfig(**settings))
    return settings


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
