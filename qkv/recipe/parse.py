"""Read recipes: YAML files, changes of the command line, and mappings become validated dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from qkv import families, spec
from qkv.errors import InputError, did_you_mean
from qkv.recipe.objectives import OBJECTIVE_CONFIGS, ObjectiveConfig
from qkv.recipe.schema import BaseRecipe, Recipe, recipe_class
from qkv.recipe.task_names import ALIASES
from qkv.registry import load_plugins
from qkv.renamed import renamed_recipe_key_message, renamed_value, renamed_value_message

RECIPE_FILE = "recipe.yaml"  # the recipe in a run folder


def read_run_recipe(path: str | Path) -> Recipe:
    """Read the recipe of a run folder, which may come from elsewhere: no module that it names is imported."""
    return read_recipe(path, import_modules=False)


def read_recipe(path: str | Path, overrides: list[str] | None = None, *, import_modules: bool = True) -> Recipe:
    """Read a recipe file and apply `key=value` overrides; an unknown key is refused with the nearest known one.

    Args:
        path: the YAML file.
        overrides: changes such as "train.max_steps=100".
        import_modules: import the modules of the key `imports`; if False, they must have been imported.
    """
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
    return validate_recipe(raw, str(path), import_modules=import_modules)


def validate_recipe(raw: dict[str, Any], location: str, *, import_modules: bool = True) -> Recipe:
    """Parse a mapping as a recipe and validate its model section, before any data is read."""
    recipe = parse_recipe(raw, location, import_modules=import_modules)
    model_config(recipe, location)
    return recipe


def apply_overrides(raw: dict[str, Any], overrides: Iterable[str]) -> None:
    """Apply `key=value` overrides, such as train.max_steps=100, to a mapping in place."""
    for override in overrides:
        _apply_override(raw, override)


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, separator, value_text = override.partition("=")
    if not separator or not key:
        raise InputError(f"'{override}': an override is key=value, such as train.max_steps=100")
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


def parse_recipe(raw: dict[str, Any], location: str, *, import_modules: bool = True) -> Recipe:
    """Parse a mapping, as read from YAML, as the recipe class of its keys; the model section is not validated."""
    from pydantic import TypeAdapter, ValidationError

    _load_imports(raw.get("imports"), location, import_modules)
    recipe_type = recipe_class(raw)
    messages = [message for key, value in _leaves(raw) for message in _renamed_messages(key, value, raw)]
    if messages:
        raise InputError(f"{location}: {'; '.join(dict.fromkeys(messages))}")
    if isinstance(raw.get("task"), str):
        raw = raw | {"task": {"name": raw["task"]}}
    if isinstance(raw.get("task"), dict) and str(raw["task"].get("name")) in ALIASES:
        raw = raw | {"task": raw["task"] | {"name": ALIASES[raw["task"]["name"]]}}
    if "objective" in raw:
        raw = raw | {"objective": _parse_objectives(raw["objective"], location)}
    try:
        return cast(Recipe, TypeAdapter(recipe_type).validate_python(raw))
    except ValidationError as error:
        first_error = error.errors()[0]
        # for a value of several possible types, pydantic appends the type to the key
        key = ".".join(
            str(component)
            for component in first_error["loc"]
            if component != "str" and not str(component).startswith("list[")
        )
        raise InputError(f"{location}: {_explain(key, first_error, recipe_type)}") from None


def _load_imports(modules: Any, location: str, import_modules: bool) -> None:
    """Import the modules that a recipe names, before the names that they register are validated."""
    if modules is None:
        return
    if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        raise InputError(
            f"{location}: key 'imports' cannot be {modules!r}: it is a list of modules, such as [my_module]"
        )
    missing = [module for module in modules if module not in sys.modules]
    if missing and not import_modules:
        raise InputError(
            f"{location}: needs the module '{missing[0]}', which is not imported from a run folder; "
            f"if you trust it, run qkv --import {missing[0]} … (in Python: import {missing[0]})"
        )
    try:
        load_plugins(modules)
    except InputError as error:
        raise InputError(f"{location}: imports: {error}") from None


def _parse_objectives(section: Any, location: str) -> dict[str, ObjectiveConfig]:
    """Validate the section `objective`: the name of an objective, or a mapping of names to settings."""
    from pydantic import TypeAdapter, ValidationError

    known = OBJECTIVE_CONFIGS.names()
    section = {section: {}} if isinstance(section, str) else section
    if not isinstance(section, dict):
        raise InputError(
            f"{location}: key 'objective' cannot be {section!r}: it is a section of keys: {', '.join(known)}"
        )
    if not section:
        raise InputError(f"{location}: key 'objective' names no objective; known: {', '.join(known)}")
    configs = {}
    for name, settings in section.items():
        if name not in OBJECTIVE_CONFIGS:
            raise InputError(f"{location}: unknown key 'objective.{name}'; {did_you_mean(str(name), known)}")
        config_class = OBJECTIVE_CONFIGS.get(name)
        try:
            configs[name] = TypeAdapter(config_class).validate_python({} if settings is None else settings)
        except ValidationError as error:
            first_error = error.errors()[0]
            key = ".".join(["objective", name, *map(str, first_error["loc"])])
            raise InputError(f"{location}: {_explain(key, first_error, config_class)}") from None
    return configs


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each leaf of a mapping; the items of a list have the key of the list."""
    if isinstance(value, dict) and (value or not key):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and value:
        for item in value:
            yield from _leaves(item, key)
    else:
        yield key, value


def _renamed_messages(key: str, value: Any, raw: Mapping[str, Any]) -> list[str]:
    """Return messages with the new names if a key or a value has an old name."""
    section = raw.get(key.partition(".")[0])
    kind = section.get("family") or section.get("name") if isinstance(section, dict) else section
    kind = ALIASES.get(str(kind)) or renamed_value("task", kind) or str(kind)
    messages = renamed_recipe_key_message(key, kind), renamed_value_message(key, value)
    return [message for message in messages if message is not None]


def _explain(key: str, error: Any, recipe_type: Any) -> str:
    """Return a message of one line for the first error of a validation."""
    *parents, name = key.split(".")
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = _section_keys(recipe_type, parents)
        return f"unknown key '{key}'; {did_you_mean(name, known)}"
    if error["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"key '{key}' is missing"
    if error["type"] == "value_error":  # raised by a section's own check
        return f"key '{key}': {error['ctx']['error']}" if key else str(error["ctx"]["error"])
    message = error["msg"]
    if error["type"] == "dataclass_type":
        message = f"it is a section of keys: {', '.join(_section_keys(recipe_type, key.split('.')))}"
    return f"key '{key}' cannot be {error['input']!r}: {message[:1].lower()}{message[1:]}"


def _section_keys(recipe_type: Any, parents: list[str]) -> list[str]:
    """Return the keys of a section, given by the keys that lead to it."""
    for parent in parents:
        hint = typing.get_type_hints(recipe_type).get(parent, recipe_type)
        options = [option for option in typing.get_args(hint) or (hint,) if dataclasses.is_dataclass(option)]
        recipe_type = options[0] if options else recipe_type
    return [f.name for f in dataclasses.fields(recipe_type)]


def model_config(recipe: BaseRecipe, location: str = "recipe") -> Any:
    """Return the family's Config of a new model: its preset with the recipe's changes; None for `model.init_from`."""
    from pydantic import TypeAdapter, ValidationError

    fields = dict(recipe.model)
    if "init_from" in fields:
        extra_keys = sorted(set(fields) - {"init_from", *DROPOUT_KEYS})
        if extra_keys:
            message = f"a pretrained model has a fixed shape, except dropout; leave out {', '.join(extra_keys)}"
            raise InputError(f"{location}: model.init_from: {message}")
        for key in DROPOUT_KEYS:
            _check_fraction(fields.get(key, 0.0), key, location)
        return None
    name, size = fields.pop("family", None), fields.pop("size", None)
    if name is None:
        family_names = ", ".join(families.names())
        raise InputError(
            f"{location}: key 'model.family' is missing (or model.init_from, a pretrained model); known: {family_names}"
        )
    module = families.get_family(str(name))
    size = ("base" if "base" in module.PRESETS else next(iter(module.PRESETS))) if size is None else size
    if str(size) not in module.PRESETS:
        raise InputError(
            f"{location}: model.size: {name} has no size '{size}'; {did_you_mean(str(size), module.PRESETS)}"
        )
    known = {f.name: getattr(module.PRESETS[size], f.name) for f in dataclasses.fields(module.Config)}
    for key in fields:
        if key not in known:
            raise InputError(f"{location}: unknown key 'model.{key}'; {did_you_mean(key, [*known, 'family', 'size'])}")
    try:
        config = TypeAdapter(module.Config).validate_python(known | fields)
    except ValidationError as error:
        first_error = error.errors()[0]
        raise InputError(
            f"{location}: {_explain('.'.join(['model', *map(str, first_error['loc'])]), first_error, BaseRecipe)}"
        ) from None
    for key in fields:
        value = getattr(config, key)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise InputError(f"{location}: key 'model.{key}' cannot be {value}: it must be 1 or more")
        if isinstance(value, float):
            _check_fraction(value, key, location)
    return config


DROPOUT_KEYS = ("dropout", "attention_dropout")  # keys of `model` that may be set next to init_from


def _check_fraction(value: Any, key: str, location: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise InputError(f"{location}: key 'model.{key}' cannot be {value}: it must be at least 0 and below 1")


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


def recipe_to_yaml(recipe: Recipe) -> str:
    """Return a recipe as YAML, overrides included."""
    raw = json.loads(json.dumps(dataclasses.asdict(recipe)))
    return dump_yaml(raw)


def dump_yaml(raw: dict[str, Any]) -> str:
    """Return a mapping as YAML, in the order of its keys."""
    return yaml.safe_dump(raw, sort_keys=False, allow_unicode=True)
