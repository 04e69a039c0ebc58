"""Specs as JSON, in which every object names its type; reading one validates it as a whole."""

from __future__ import annotations

import json
import typing
from dataclasses import fields, is_dataclass
from typing import Any

from qkv.errors import InputError, describe_value, did_you_mean, quote
from qkv.json_reader import parse_json
from qkv.renamed import renamed_spec_key, renamed_spec_type, renamed_value
from qkv.spec import model as s
from qkv.spec.characters import CharacterEmbedding
from qkv.spec.check import check_model, matches_type

_SPEC_CLASSES: tuple[type, ...] = (
    s.LoraConfig,
    s.Attention,
    s.BagOfWords,
    s.BiLM,
    s.Block,
    CharacterEmbedding,
    s.Clusters,
    s.Embedding,
    s.FeedForward,
    s.Head,
    s.Model,
    s.Norm,
    s.PatchEmbedding,
    s.RelativePositions,
)
_SPEC_CLASSES += (s.RecurrentEncoder, s.RecurrentDecoder, s.RecurrentStack, s.RelativePositionBias, s.TransformerStack)
_CLASS_BY_NAME: dict[str, type] = {cls.__name__: cls for cls in _SPEC_CLASSES}


def _to_dict(value: Any) -> Any:
    if not is_dataclass(value):
        return value
    return {"type": type(value).__name__} | {f.name: _to_dict(getattr(value, f.name)) for f in fields(value)}


def to_json(model: s.Model) -> str:
    """Return the spec as JSON, in which every object names its type."""
    return json.dumps(_to_dict(model), indent=2) + "\n"


def from_json(text: str, location: str = "spec") -> s.Model:
    """Return the model of a JSON text (the inverse of `to_json`); `location` names the file in messages."""
    model = _from_dict(parse_json(text, location), location)
    if not isinstance(model, s.Model):
        raise InputError(f"{location}: holds a {type(model).__name__}, not a Model")
    try:
        check_model(model)
    except InputError as error:
        raise InputError(f"{location}: {error}") from None
    return model


def _from_dict(raw: Any, location: str) -> Any:
    if isinstance(raw, list):
        return tuple(_from_dict(item, location) for item in raw)
    if not isinstance(raw, dict):
        return raw
    name = raw.get("type")
    if not isinstance(name, str) or name not in _CLASS_BY_NAME:
        _refuse_renamed(location, f"the type {name}", renamed_spec_type(str(name)))
        raise InputError(f"{location}: unknown type {quote(name)}; {did_you_mean(str(name)[:60], _CLASS_BY_NAME)}")
    cls, hints = _CLASS_BY_NAME[name], typing.get_type_hints(_CLASS_BY_NAME[name])
    values = {}
    for key, value in raw.items():
        if key == "type":
            continue
        if key not in hints:
            _refuse_renamed(location, f"{name}.{key}", renamed_spec_key(name, key))
            raise InputError(f"{location}: {name} has no field {quote(key)}; {did_you_mean(key[:60], hints)}")
        values[key] = _from_dict(value, f"{location}: {key}")
        if not matches_type(values[key], hints[key]):
            _refuse_renamed(location, f"{name}.{key} '{value}'", renamed_value(f"{name}.{key}", value))
            raise InputError(f"{location}: {name}.{key} cannot be {describe_value(value)}")
    try:
        return cls(**values)
    except TypeError as error:
        raise InputError(f"{location}: {name}: {error}") from None


def _refuse_renamed(location: str, old: str, new_name: str | None) -> None:
    """Refuse a name of an earlier release with its new name; None: it has none."""
    if new_name is not None:
        advice = "an earlier release wrote this file; rename it there, or train the model again"
        raise InputError(f"{location}: {old} is now '{new_name}'; {advice}")
