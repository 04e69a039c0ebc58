"""The recipe section `model`: the family's Config of a new model, or a pretrained model. Imports no torch."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from typing import Any

from qkv import families, spec
from qkv.errors import InputError, did_you_mean, quote
from qkv.recipe.base import BaseRecipe
from qkv.recipe.messages import error_key, explain, unknown_key
from qkv.score_functions import SCORE_FUNCTIONS
from qkv.spec.check import check_value

DROPOUT_KEYS = ("dropout", "attention_dropout")  # keys that may be set next to init_from


def model_config(recipe: BaseRecipe, location: str = "recipe") -> Any:
    """Return the family's Config of a new model: its preset with the recipe's changes; None for `model.init_from`."""
    fields = dict(recipe.model)
    if "init_from" in fields:
        _check_pretrained(fields, location)
        return None
    name, size, embeddings = (fields.pop(key, None) for key in ("family", "size", "embeddings"))
    if embeddings is not None and (not isinstance(embeddings, str) or not embeddings.strip()):
        raise InputError(f"{location}: key 'model.embeddings' is a file of word vectors, not {quote(embeddings)}")
    if name is None:
        family_names = ", ".join(families.names())
        raise InputError(
            f"{location}: key 'model.family' is missing (or model.init_from, a pretrained model); known: {family_names}"
        )
    try:
        module = families.get_family(str(name))
    except InputError as error:
        raise InputError(f"{location}: {error}") from None
    size = ("base" if "base" in module.PRESETS else next(iter(module.PRESETS))) if size is None else str(size)
    if size not in module.PRESETS:
        raise InputError(
            f"{location}: model.size: {name} has no size {quote(size)}; {did_you_mean(size[:60], module.PRESETS)}"
        )
    return _validate_config(module.Config, module.PRESETS[size], fields, location)


def _check_pretrained(fields: dict[str, Any], location: str) -> None:
    if not isinstance(fields["init_from"], str) or not fields["init_from"].strip():
        raise InputError(
            f"{location}: key 'model.init_from' is the folder or the name of a model, not {quote(fields['init_from'])}"
        )
    extra_keys = sorted(set(fields) - {"init_from", *DROPOUT_KEYS})
    if extra_keys:
        message = f"a pretrained model has a fixed shape, except dropout; leave out {', '.join(extra_keys)}"
        raise InputError(f"{location}: model.init_from: {message}")
    for key in DROPOUT_KEYS:
        value = fields.get(key, 0.0)
        check_value(key, float, float(value) if type(value) is int else value, f"{location}: key 'model.{key}'")


def _validate_config(config_class: Any, preset: Any, fields: dict[str, Any], location: str) -> Any:
    """Return a preset with the fields of a recipe, whose types and ranges are checked."""
    from pydantic import TypeAdapter, ValidationError

    known = {f.name: getattr(preset, f.name) for f in dataclasses.fields(config_class)}
    hints = typing.get_type_hints(config_class)

    def has_key(key: str) -> bool:
        section, _, name = key.partition(".")
        return section != "model" or name in (*known, "family", "init_from", "embeddings")

    for key, value in fields.items():
        if key not in known:
            keys = [*known, "family", "size", "embeddings"]
            raise InputError(f"{location}: {unknown_key(f'model.{key}', keys, has_key)}")
        if isinstance(value, bool) and bool not in (hints[key], *typing.get_args(hints[key])):
            raise InputError(f"{location}: key 'model.{key}' cannot be {str(value).lower()}: it is no switch")
    try:
        config = TypeAdapter(config_class).validate_python(known | fields)
    except ValidationError as error:
        first_error = error.errors()[0]
        key = ".".join(["model", *filter(None, [error_key(first_error)])])
        raise InputError(f"{location}: {explain(key, first_error, BaseRecipe)}") from None
    for key in fields:
        check_value(key, hints[key], getattr(config, key), f"{location}: key 'model.{key}'")
    if "attention" in fields and fields["attention"] not in ["none", *SCORE_FUNCTIONS.names()]:
        hint = did_you_mean(str(fields["attention"])[:60], ["none", *SCORE_FUNCTIONS.names()])
        raise InputError(f"{location}: model.attention: no score function {quote(fields['attention'])}; {hint}")
    return config


def model_spec(recipe: BaseRecipe, **vocab_args: int | None) -> spec.Model:
    """Return the spec of a new encoder-decoder.

    Args:
        recipe: a recipe with `model.family`.
        vocab_args: `source_vocab_size`, `target_vocab_size`, `bos_id` and `eos_id`.
    """
    module = families.get_family(recipe.model["family"])
    if not {"source_vocab_size", "target_vocab_size", "bos_id", "eos_id"} <= set(
        inspect.signature(module.make_spec).parameters
    ):
        raise InputError(f"model.family: {recipe.model['family']} is no encoder-decoder, which pairs need")
    model: spec.Model = module.make_spec(model_config(recipe), **vocab_args)
    return model
