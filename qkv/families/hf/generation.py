"""Generation settings of a Hugging Face checkpoint: generation_config.json, or the same keys in an old config.json.

Settings are mappings by the names of `qkv.generation.GenerationConfig`, so that this package need not import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qkv.errors import InputError

GENERATION_CONFIG_FILE = "generation_config.json"
_INT, _FLOAT, _BOOL, _IDS, _WORDS, _TEXTS = (
    "a whole number",
    "a number",
    "true or false",
    "ids",
    "lists of ids",
    "texts",
)
_TYPES = {
    "num_beams": _INT,
    "num_beam_groups": _INT,
    "length_penalty": _FLOAT,
    "diversity_penalty": _FLOAT,
    "do_sample": _BOOL,
    "temperature": _FLOAT,
    "top_k": _INT,
    "top_p": _FLOAT,
    "min_p": _FLOAT,
    "typical_p": _FLOAT,
    "repetition_penalty": _FLOAT,
    "no_repeat_ngram_size": _INT,
    "renormalize_logits": _BOOL,
    "min_new_tokens": _INT,
    "max_new_tokens": _INT,
    "min_length": _INT,
    "max_length": _INT,
    "forced_bos_token_id": _INT,
    "forced_eos_token_id": _INT,
    "suppress_tokens": _IDS,
    "begin_suppress_tokens": _IDS,
    "bad_words_ids": _WORDS,
    "stop_strings": _TEXTS,
}
_RENAMED = {"num_return_sequences": "n_best"}
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
# settings that change the output and that qkv does not have, with the values that have no effect
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "penalty_alpha": (),
    "guidance_scale": (1, 1.0),
    "sequence_bias": (),
    "exponential_decay_length_penalty": (),
    "constraints": (),
    "force_words_ids": (),
    "dola_layers": (),
}


def read_generation_settings(config: Mapping[str, Any], eos_id: int, where: str) -> tuple[dict[str, Any], list[str]]:
    """Return our settings for a generation config, and the names of settings that are not supported.

    Args:
        config: content of generation_config.json or config.json.
        eos_id: the model's EOS; further ids of `eos_token_id` end an output too.
        where: the file, for error messages.
    """
    settings: dict[str, Any] = {}
    for name, kind in _TYPES.items():
        value = config.get(name)
        if value is not None:
            settings[name] = _checked(name, value, kind, where)
    for name, ours in _RENAMED.items():
        if config.get(name) is not None:
            settings[ours] = _checked(name, config[name], _INT, where)
    if config.get("early_stopping") is not None:
        if config["early_stopping"] not in (True, False, "never"):
            raise InputError(
                f'{where}: early_stopping is true, false or "never", not {_quoted(config["early_stopping"])}'
            )
        settings["early_stopping"] = config["early_stopping"]
    eos_ids = config.get("eos_token_id")
    if isinstance(eos_ids, list):
        further = tuple(token for token in _checked("eos_token_id", eos_ids, _IDS, where) if token != eos_id)
        settings |= {"stop_token_ids": further} if further else {}
    if not settings.get("do_sample"):  # transformers ignores them then
        settings = {name: value for name, value in settings.items() if name not in _SAMPLING}
    elif settings.get("top_k") == 0:
        del settings["top_k"]
    unsupported = [
        name for name, neutral in _UNSUPPORTED.items() if config.get(name) is not None and config[name] not in neutral
    ]
    return settings, unsupported


def write_generation_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of generation_config.json for our settings."""
    config: dict[str, Any] = {}
    names = {ours: theirs for theirs, ours in _RENAMED.items()}
    for name, value in settings.items():
        if name in _TYPES or name in names or name == "early_stopping":
            plain = (
                [list(item) if isinstance(item, tuple) else item for item in value]
                if isinstance(value, tuple)
                else value
            )
            config[names.get(name, name)] = plain
    return config


def _checked(name: str, value: Any, kind: str, where: str) -> Any:
    """Return a value of the right type, lists as tuples."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if kind == _INT and is_int and abs(value) < 2**63:
        return value
    if kind == _FLOAT and (is_int or isinstance(value, float)):
        return float(value)
    if kind == _BOOL and isinstance(value, bool):
        return value
    if kind == _TEXTS and isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        if kind == _TEXTS and all(isinstance(item, str) for item in value):
            return tuple(value)
        if kind == _IDS:
            return tuple(_checked(name, item, _INT, where) for item in value)
        if kind == _WORDS:
            return tuple(_checked(name, item, _IDS, where) for item in value)
    raise InputError(f"{where}: {name} must be {kind}, not {_quoted(value)}")


def _quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
