"""The generation settings that a checkpoint comes with: generation_config.json, or the same keys in config.json."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qkv import families, spec
from qkv.checkpoints.hf_checkpoint import CONFIG_FILE, read_json
from qkv.errors import InputError
from qkv.families.hf.convert import has_hf_form, to_hf_config
from qkv.families.hf.generation import GENERATION_CONFIG_FILE, read_generation_settings, write_generation_settings
from qkv.files import atomic_write_text

_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def load_generation_settings(folder: Path, model_spec: spec.Model) -> dict[str, Any]:
    """Return the settings of a model that generates text, by the names of `qkv.GenerationConfig`."""
    if model_spec.decoder is None or model_spec.head is None or model_spec.head.kind != "lm":
        return {}
    path = next((folder / name for name in (GENERATION_CONFIG_FILE, CONFIG_FILE) if (folder / name).is_file()), None)
    if path is None:
        return {}
    settings, unsupported = read_generation_settings(read_json(path), model_spec.eos_id, str(path))
    settings["bad_words_ids"] = tuple(
        word
        for word in settings.get("bad_words_ids", ())
        if len(word) > 1
        or word[0] not in model_spec.suppress_tokens  # as Marian's padding token is, before the softmax
    )
    if unsupported:
        warnings.warn(f"{path}: {', '.join(unsupported)} not supported, and ignored", stacklevel=3)
    vocab_size = model_spec.head.num_outputs
    for name, token in _token_ids(settings):
        if not 0 <= token < vocab_size:
            raise InputError(f"{path}: {name}: token {token} is not in the vocabulary of {vocab_size:,} tokens")
    if not settings["bad_words_ids"]:
        del settings["bad_words_ids"]
    return {"unfinished_beams": "ranked"} | settings  # as transformers ranks them


def save_generation_settings(folder: Path, settings: Mapping[str, Any], model_spec: spec.Model) -> None:
    """Write generation_config.json, if a model has settings."""
    config = write_generation_settings(settings)
    if not config:
        return
    if model_spec.suppress_tokens:  # transformers does not look for them in config.json then
        config["bad_words_ids"] = [*config.get("bad_words_ids", []), *([token] for token in model_spec.suppress_tokens)]
        config["renormalize_logits"] = True
    plain = spec.replace(model_spec, lora=None)
    has_config = hasattr(families.get_family(plain.family), "HF_FORMAT") and has_hf_form(plain)
    hf_config = to_hf_config(plain) if has_config else {"eos_token_id": plain.eos_id}
    config |= {name: hf_config[name] for name in _SPECIAL_TOKENS if hf_config.get(name) is not None}
    if settings.get("stop_token_ids"):
        config["eos_token_id"] = [model_spec.eos_id, *settings["stop_token_ids"]]
    atomic_write_text(folder / GENERATION_CONFIG_FILE, json.dumps(config, indent=2) + "\n")


def _token_ids(settings: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in settings.items():
        if name in ("forced_bos_token_id", "forced_eos_token_id"):
            yield name, value
        elif name in ("suppress_tokens", "begin_suppress_tokens", "stop_token_ids"):
            yield from ((name, token) for token in value)
        elif name == "bad_words_ids":
            yield from ((name, token) for word in value for token in word)
