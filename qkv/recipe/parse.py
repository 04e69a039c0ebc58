"""A recipe: everything that decides a run, as a commented YAML file read into dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from qkv import families, spec
from qkv.errors import InputError, did_you_mean
from qkv.recipe.schema import BaseRecipe, FinetuneRecipe, PretrainingRecipe, Recipe, Seq2SeqRecipe
from qkv.recipe.task_names import ALIASES
from qkv.renamed import renamed_recipe_key_message, renamed_value, renamed_value_message
from qkv.train.schedule import noam_peak


def read_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """A recipe file with `key=value` changes on top; an unknown key is refused with the nearest known one."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such recipe")
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line_suffix = f", line {mark.line + 1}" if mark else ""
        raise InputError(f"{path}{line_suffix}: not YAML: {getattr(error, 'problem', None) or error}") from None
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path}: a recipe is a mapping of keys to values")
    apply_overrides(raw, overrides or [])
    raw.setdefault("name", path.stem)
    return validate_recipe(raw, str(path))


def validate_recipe(raw: dict[str, Any], location: str) -> Recipe:
    """A mapping as a recipe, its model's keys included: a wrong one is found now, not after the data is read."""
    recipe = parse_recipe(raw, location)
    model_config(recipe, location)
    return recipe


def apply_overrides(raw: dict[str, Any], overrides: Iterable[str]) -> None:
    """Puts `key=value` changes into a mapping."""
    for override in overrides:
        _apply_override(raw, override)


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, separator, value_text = override.partition("=")
    if not separator or not key:
        raise InputError(f"'{override}': changes are written key=value, such as train.max_steps=100")
    try:
        value = yaml.safe_load(value_text)
    except yaml.YAMLError:
        raise InputError(f"'{override}': the value is not YAML") from None
    messages = _renamed_messages(key, value, raw)
    if messages:
        raise InputError(f"'{override}': {'; '.join(messages)}")
    *parents, name = key.split(".")
    section = raw
    for parent in parents:
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            raise InputError(f"'{override}': {parent} is a value, not a section")
    section[name] = value


def parse_recipe(raw: dict[str, Any], location: str) -> Recipe:
    """A mapping as read from YAML or JSON, checked; with `objective` it is about text."""
    from pydantic import TypeAdapter, ValidationError

    recipe_type: Any = PretrainingRecipe if "objective" in raw else FinetuneRecipe if "task" in raw else Seq2SeqRecipe
    messages = [message for key, value in _leaves(raw) for message in _renamed_messages(key, value, raw)]
    if messages:
        raise InputError(f"{location}: {'; '.join(dict.fromkeys(messages))}")
    if isinstance(raw.get("task"), str):
        raw = raw | {"task": {"name": raw["task"]}}
    if isinstance(raw.get("task"), dict) and str(raw["task"].get("name")) in ALIASES:
        raw = raw | {"task": raw["task"] | {"name": ALIASES[raw["task"]["name"]]}}
    objective = raw.get("objective")
    if isinstance(objective, str):  # the objective as its paper has it
        raw = raw | {"objective": {objective: {}}}
    elif isinstance(objective, dict):
        raw = raw | {"objective": {name: {} if value is None else value for name, value in objective.items()}}
    try:
        recipe: Recipe = TypeAdapter(recipe_type).validate_python(raw)
    except ValidationError as error:
        first_error = error.errors()[0]
        # of a value that may be of several types, pydantic names the type behind the key
        key = ".".join(str(component) for component in first_error["loc"] if component != "str" and not str(component).startswith("list["))
        raise InputError(f"{location}: {_explain(key, first_error, recipe_type)}") from None
    if recipe.train.epochs is not None and not isinstance(recipe, FinetuneRecipe):
        raise InputError(f"{location}: train.epochs: goes with tasks; give train.max_steps here")
    if isinstance(recipe, PretrainingRecipe) and not recipe.objective.active:
        raise InputError(f"{location}: key 'objective' names none; known: clm, mlm, denoising, span_corruption")
    return recipe


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a mapping, each under its dotted key; those of a list under that of the list."""
    if isinstance(value, dict) and (value or not key):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and value:
        for item in value:
            yield from _leaves(item, key)
    else:
        yield key, value


def _renamed_messages(key: str, value: Any, raw: Mapping[str, Any]) -> list[str]:
    """What a key or a value with an old name is called now."""
    section = raw.get(key.partition(".")[0])
    kind = section.get("family") or section.get("name") if isinstance(section, dict) else section
    kind = ALIASES.get(str(kind)) or renamed_value("task", kind) or str(kind)
    messages = renamed_recipe_key_message(key, kind), renamed_value_message(key, value)
    return [message for message in messages if message is not None]


def _explain(key: str, error: Any, recipe_type: Any) -> str:
    *parents, name = key.split(".")
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = _section_keys(recipe_type, parents)
        return f"unknown key '{key}'; {did_you_mean(name, known)}"
    if error["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"key '{key}' is missing"
    if error["type"] == "value_error":  # ours, which says what the value is and what it may be
        return f"key '{key}': {error['ctx']['error']}"
    message = error["msg"]
    if error["type"] == "dataclass_type":
        message = f"it is a section of keys: {', '.join(_section_keys(recipe_type, key.split('.')))}"
    return f"key '{key}' cannot be {error['input']!r}: {message[:1].lower()}{message[1:]}"


def _section_keys(recipe_type: Any, parents: list[str]) -> list[str]:
    """The keys that may stand under others."""
    for parent in parents:
        hint = typing.get_type_hints(recipe_type).get(parent, recipe_type)
        options = [option for option in typing.get_args(hint) or (hint,) if dataclasses.is_dataclass(option)]
        recipe_type = options[0] if options else recipe_type
    return [f.name for f in dataclasses.fields(recipe_type)]


def model_config(recipe: BaseRecipe, location: str = "recipe") -> Any:
    """The model's shape: the family's size with the recipe's changes."""
    from pydantic import TypeAdapter, ValidationError

    fields = dict(recipe.model)
    if "init_from" in fields:
        extra_keys = sorted(set(fields) - {"init_from", *DROPOUT_KEYS})
        if extra_keys:
            message = f"a model that is there has its shape, but for dropout; leave out {', '.join(extra_keys)}"
            raise InputError(f"{location}: model.init_from: {message}")
        for key in DROPOUT_KEYS:
            _check_fraction(fields.get(key, 0.0), key, location)
        return None
    name, size = fields.pop("family", None), fields.pop("size", None)
    if name is None:
        known = ", ".join(families.names())
        raise InputError(
            f"{location}: key 'model.family' is missing (or model.init_from, a model that is there); known: {known}"
        )
    module = families.get_family(str(name))
    size = ("base" if "base" in module.PRESETS else next(iter(module.PRESETS))) if size is None else size
    if str(size) not in module.PRESETS:
        raise InputError(f"{location}: model.size: {name} has no size '{size}'; {did_you_mean(str(size), module.PRESETS)}")
    known = {f.name: getattr(module.PRESETS[size], f.name) for f in dataclasses.fields(module.Config)}
    for key in fields:
        if key not in known:
            raise InputError(f"{location}: unknown key 'model.{key}'; {did_you_mean(key, [*known, 'family', 'size'])}")
    try:
        config = TypeAdapter(module.Config).validate_python(known | fields)
    except ValidationError as error:
        first_error = error.errors()[0]
        raise InputError(f"{location}: {_explain('.'.join(['model', *map(str, first_error['loc'])]), first_error, BaseRecipe)}") from None
    for key in fields:
        value = getattr(config, key)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise InputError(f"{location}: key 'model.{key}' cannot be {value}: it counts something; give 1 or more")
        if isinstance(value, float):
            _check_fraction(value, key, location)
    return config


DROPOUT_KEYS = ("dropout", "attention_dropout")  # what may change of a model that is there


def _check_fraction(value: Any, key: str, location: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise InputError(f"{location}: key 'model.{key}' cannot be {value}: it is a share; give 0 or more, under 1")


def model_spec(recipe: BaseRecipe, **vocab_args: int) -> spec.Model:
    """What the recipe's model is, for vocabularies of these sizes (`source_vocab_size`, `target_vocab_size`) and these `bos_id` and `eos_id`."""
    module = families.get_family(recipe.model["family"])
    if not {"source_vocab_size", "target_vocab_size", "bos_id", "eos_id"} <= set(inspect.signature(module.make_spec).parameters):
        raise InputError(f"model.family: {recipe.model['family']} is no encoder-decoder, and these pairs need one")
    model: spec.Model = module.make_spec(model_config(recipe), **vocab_args)
    return model


def peak_learning_rate(recipe: BaseRecipe, s: spec.Model) -> float:
    """The learning rate's peak: given, or the paper's for this width."""
    if recipe.train.noam_factor is None:
        return recipe.train.learning_rate
    d_model = (s.target_embedding or s.source_embedding).d_model  # type: ignore[union-attr]  # a model has one of them
    warmup_steps = recipe.train.warmup_steps_of(recipe.train.max_steps or 0)
    if not warmup_steps:
        raise InputError("train.noam_factor: the paper's schedule needs a warm-up; set train.warmup_steps to 1 or more")
    return noam_peak(d_model, warmup_steps, recipe.train.noam_factor)


def recipe_to_yaml(recipe: Recipe) -> str:
    """The recipe as it was run, changes included."""
    raw = json.loads(json.dumps(dataclasses.asdict(recipe)))
    if "objective" in raw:  # what is not chosen reads back as chosen with its paper's figures
        raw["objective"] = {name: config for name, config in raw["objective"].items() if config is not None}
    return dump_yaml(raw)


def dump_yaml(raw: dict[str, Any]) -> str:
    """A mapping as a recipe file has it."""
    return yaml.safe_dump(raw, sort_keys=False, allow_unicode=True)
