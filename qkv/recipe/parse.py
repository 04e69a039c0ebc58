"""Read recipes: YAML files, changes of the command line, and mappings become validated dataclasses."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import yaml

from qkv.errors import InputError, check_flag, check_names, check_path, quote
from qkv.files import parse_yaml, read_yaml
from qkv.recipe.messages import error_key, explain, leaves, renamed_messages, unknown_key
from qkv.recipe.model_section import model_config
from qkv.recipe.objectives import OBJECTIVE_CONFIGS, ObjectiveConfig
from qkv.recipe.packaged import find_recipe
from qkv.recipe.schema import Recipe, recipe_class
from qkv.recipe.task_names import ALIASES
from qkv.registry import load_plugins

RECIPE_FILE = "recipe.yaml"  # the recipe in a run folder
_ALTERNATIVES = (
    ("train.epochs", "train.max_steps"),
    ("train.batch_size", "train.batch_tokens"),
    ("train.warmup_steps", "train.warmup_ratio"),
)
_ADAPTERS: dict[type, Any] = {}  # validators of recipe classes: making one takes as long as several validations
_OPTIONAL_SECTIONS = ("tokenizer", "finetune", "validation", "test")  # empty, null and missing are the same


def read_run_recipe(path: str | Path) -> Recipe:
    """Read the recipe of a run folder, which may come from elsewhere: no module that it names is imported."""
    return read_recipe(path, import_modules=False)


def read_recipe(path: str | Path, overrides: list[str] | None = None, *, import_modules: bool = True) -> Recipe:
    """Read a recipe and apply `key=value` overrides; an unknown key is refused with the nearest known one.

        recipe = qkv.read_recipe("recipes/g2p-demo.yaml", ["train.max_steps=100"])

    Args:
        path: the YAML file, or the name of a recipe that comes with qkv, such as "g2p-demo".
        overrides: changes such as "train.max_steps=100".
        import_modules: import the modules of the key `imports`; if False, they must have been imported.
    """
    check_flag(import_modules, "import_modules")
    changes = check_names(() if overrides is None else overrides, "overrides", "a list of key=value")
    raw = read_raw_recipe(check_path(path, "path", "the path of a recipe"))
    apply_overrides(raw, changes)
    return validate_recipe(raw, str(path), import_modules=import_modules)


def read_raw_recipe(path: str | Path) -> dict[str, Any]:
    """Return the mapping of a recipe file, or of a recipe that comes with qkv, with its name."""
    file = find_recipe(path)
    raw = read_yaml(file)
    if not isinstance(raw, dict):
        raise InputError(f"{file}: a recipe is a mapping of keys to values")
    raw.setdefault("name", file.stem)
    return raw


def validate_recipe(raw: dict[str, Any], location: str, *, import_modules: bool = True) -> Recipe:
    """Parse a mapping as a recipe and validate its model section, before any data is read."""
    recipe = parse_recipe(raw, location, import_modules=import_modules)
    model_config(recipe, location)
    return recipe


def apply_overrides(raw: dict[str, Any], overrides: Iterable[str]) -> None:
    """Apply `key=value` overrides, such as train.max_steps=100, to a mapping in place.

    An override of train.epochs replaces train.max_steps of the recipe, and so on for all pairs of alternatives.
    """
    overrides = list(overrides)
    keys = {override.partition("=")[0] for override in overrides}
    for first, second in _ALTERNATIVES:
        values = {key: value for key, _, value in (o.partition("=") for o in overrides) if key in (first, second)}
        if len(values) == 2 and not {"null", "~", ""} & set(values.values()):
            names = [key.partition(".")[2] for key in (second, first)]
            raise InputError(f"{names[0]} and {names[1]} are both set; set one of them")
        for key, alternative in ((first, second), (second, first)):
            section = raw.get(key.partition(".")[0])
            if key in keys and alternative not in keys and isinstance(section, dict):
                section.pop(alternative.partition(".")[2], None)
    for override in overrides:
        _apply_override(raw, override)


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, separator, value_text = override.partition("=")
    if not separator or not key:
        raise InputError(f"{quote(override)}: an override is key=value, such as train.max_steps=100")
    value = parse_yaml(value_text, quote(override))
    messages = renamed_messages(key, value, raw)
    if messages:
        raise InputError(f"{quote(override)}: {'; '.join(messages)}")
    *parents, name = key.split(".")
    section = raw
    for parent in parents:
        if section.get(parent) is None:  # missing, or a section without keys
            section[parent] = {}
        section = section[parent]
        if not isinstance(section, dict):
            raise InputError(f"{quote(override)}: {quote(parent)} is a value, not a section")
    section[name] = value


def parse_recipe(raw: dict[str, Any], location: str, *, import_modules: bool = True) -> Recipe:
    """Parse a mapping, as read from YAML, as the recipe class of its keys; the model section is not validated."""
    from pydantic import TypeAdapter, ValidationError

    _load_imports(raw.get("imports"), location, import_modules)
    recipe_type = recipe_class(raw)
    messages = [message for key, value in leaves(raw) for message in renamed_messages(key, value, raw)]
    if messages:
        raise InputError(f"{location}: {'; '.join(dict.fromkeys(messages))}")
    raw = {key: value for key, value in raw.items() if key not in _OPTIONAL_SECTIONS or value not in (None, {})}
    if isinstance(raw.get("task"), str):
        raw = raw | {"task": {"name": raw["task"]}}
    if isinstance(raw.get("task"), dict) and str(raw["task"].get("name")) in ALIASES:
        raw = raw | {"task": raw["task"] | {"name": ALIASES[raw["task"]["name"]]}}
    if "objective" in raw:
        raw = raw | {"objective": _parse_objectives(raw["objective"], location)}
    try:
        if recipe_type not in _ADAPTERS:
            _ADAPTERS[recipe_type] = TypeAdapter(recipe_type)
        return cast(Recipe, _ADAPTERS[recipe_type].validate_python(raw))
    except ValidationError as error:
        first_error = error.errors()[0]
        raise InputError(f"{location}: {explain(error_key(first_error), first_error, recipe_type)}") from None


def _load_imports(modules: Any, location: str, import_modules: bool) -> None:
    """Import the modules that a recipe names, before the names that they register are validated."""
    if modules is None:
        return
    if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        raise InputError(
            f"{location}: key 'imports' cannot be {quote(modules)}: it is a list of modules, such as [my_module]"
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
            f"{location}: key 'objective' cannot be {quote(section)}: it is a section of keys: {', '.join(known)}"
        )
    if not section:
        raise InputError(f"{location}: key 'objective' names no objective; known: {', '.join(known)}")
    configs = {}
    for name, settings in section.items():
        if name not in OBJECTIVE_CONFIGS:
            raise InputError(f"{location}: {unknown_key(f'objective.{name}', known)}")
        config_class = OBJECTIVE_CONFIGS.get(name)
        try:
            configs[name] = TypeAdapter(config_class).validate_python({} if settings is None else settings)
        except ValidationError as error:
            first_error = error.errors()[0]
            key = ".".join(["objective", name, *filter(None, [error_key(first_error)])])
            raise InputError(f"{location}: {explain(key, first_error, config_class)}") from None
    return configs


def recipe_to_yaml(recipe: Recipe) -> str:
    """Return a recipe as YAML, overrides included."""
    raw = json.loads(json.dumps(dataclasses.asdict(recipe)))
    return dump_yaml(raw)


def dump_yaml(raw: dict[str, Any]) -> str:
    """Return a mapping as YAML, in the order of its keys."""
    return yaml.safe_dump(raw, sort_keys=False, allow_unicode=True)
