"""Messages of one line for recipes that cannot be parsed: unknown, renamed and foreign keys, wrong values."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from qkv import foreign_names
from qkv.errors import did_you_mean, quote
from qkv.recipe.schema import RECIPE_CLASSES
from qkv.recipe.task_names import ALIASES
from qkv.renamed import renamed_recipe_key_message, renamed_value, renamed_value_message

_SECTIONS = ("train", "data", "validation", "finetune", "model", "tokenizer", "test")
_TOP_LEVEL_KEYS = ("name", "seed", "imports")  # of recipes of every kind, and no sections
_MODEL_KEYS = frozenset(
    key.removeprefix("model.") for key in foreign_names.RECIPE_KEYS.values() if key.startswith("model.")
)
_MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")
# type of a pydantic error -> what is expected instead; the bound is in the error's context
_EXPECTED = {
    "greater_than_equal": "it must be {ge:,} or more",
    "greater_than": "it must be more than {gt:,}",
    "less_than_equal": "it must be at most {le:,}",
    "less_than": "it must be less than {lt:,}",
    "int_parsing": "it must be a whole number",
    "int_type": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "int_parsing_size": "it must be a whole number with fewer digits",
    "float_parsing": "it must be a number",
    "float_type": "it must be a number",
    "finite_number": "it must be a finite number",
    "bool_parsing": "it must be true or false",
    "bool_type": "it must be true or false",
    "string_type": "it must be a text",
    "list_type": "it must be a list",
    "dict_type": "it must be a mapping of keys to values",
    "literal_error": "it must be {expected}",
}


def explain(key: str, error: Any, recipe_type: Any) -> str:
    """Return a message of one line for the first error of a validation.

    Args:
        key: the dotted key; "" for the recipe as a whole.
        error: an item of pydantic's `ValidationError.errors()`.
        recipe_type: the dataclass that was validated.
    """
    *parents, _ = key.split(".")
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return unknown_key(key, section_keys(recipe_type, parents), partial(_has_key, recipe_type))
    if error["type"] in _MISSING:
        return f"key '{key}' is missing"
    if error["type"] == "value_error":  # raised by a section's own check
        return f"key '{key}': {error['ctx']['error']}" if key else str(error["ctx"]["error"])
    message = error["msg"]
    if error["type"] == "dataclass_type":
        message = f"it is a section of keys: {', '.join(section_keys(recipe_type, key.split('.')))}"
    elif error["type"] in _EXPECTED:
        message = _EXPECTED[error["type"]].format(**_whole_numbers(error.get("ctx", {})))
    value = "null" if error["input"] is None else quote(error["input"])
    value = value if isinstance(error["input"], str) else value.strip("'")
    subject = f"key '{key}'" if key else "the recipe"
    return f"{subject} cannot be {value}: {message[:1].lower()}{message[1:]}"


def _whole_numbers(context: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bounds of an error, 0.0 as 0."""
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in context.items()
    }


def unknown_key(key: str, known: list[str], has_key: Callable[[str], bool] | None = None) -> str:
    """Return the message for an unknown key: the key that users of other toolkits mean, else the nearest known one.

    Args:
        key: the unknown dotted key.
        known: the keys of its section.
        has_key: whether the recipe can have a dotted key.
    """
    hint, has_key = foreign_names.recipe_key_hint(key), has_key or (lambda dotted: dotted == hint)
    if hint is not None and hint.startswith("--"):
        return f"unknown key {quote(key)}; use the option {hint}"
    if hint is not None and has_key(hint):
        return f"unknown key {quote(key)}; qkv calls it {hint}"
    section, _, name = key.rpartition(".")
    if section and name not in known and name in _TOP_LEVEL_KEYS:
        return f"unknown key {quote(key)}; it belongs to no section: {name}"
    elsewhere = [f"{section}.{name}" for section in _SECTIONS if has_key(f"{section}.{name}")]
    if len(elsewhere) == 1 and name not in known:
        return f"unknown key {quote(key)}; it belongs to a section: {elsewhere[0]}"
    return f"unknown key {quote(key)}; {did_you_mean(name[:60], known)}"


def _has_key(recipe_type: Any, key: str) -> bool:
    """Return whether recipes of a class have a key; those of `model` depend on the family."""
    *parents, name = key.split(".")
    if parents and parents[0] not in section_keys(recipe_type, []):
        return False
    return (parents == ["model"] and name in _MODEL_KEYS) or name in section_keys(recipe_type, parents)


def find_key(name: str) -> str | None:
    """Return the dotted key of recipes of any kind that has a name, or that a foreign name stands for; None: no key."""
    hint = foreign_names.recipe_key_hint(name)
    if hint is not None:
        return None if hint.startswith("--") else hint
    keys = [
        f"{section}.{name}"
        for section in _SECTIONS
        for cls in RECIPE_CLASSES.values()
        if _has_key(cls, f"{section}.{name}")
    ]
    return next(iter(keys), None)


def section_keys(recipe_type: Any, parents: list[str]) -> list[str]:
    """Return the keys of a section, given by the keys that lead to it."""
    for parent in parents:
        hint = typing.get_type_hints(recipe_type).get(parent, recipe_type)
        options = [option for option in typing.get_args(hint) or (hint,) if dataclasses.is_dataclass(option)]
        recipe_type = options[0] if options else recipe_type
    return [f.name for f in dataclasses.fields(recipe_type)]


def error_key(error: Any) -> str:
    """Return the dotted key of an error of pydantic, which appends the type if a value may have several."""
    return ".".join(
        str(component)
        for component in error["loc"]
        if component not in ("str", "int", "float", "bool") and not str(component).startswith(("list[", "function-"))
    )


def renamed_messages(key: str, value: Any, raw: Mapping[str, Any]) -> list[str]:
    """Return messages with the new names if a key or a value has an old name."""
    section = raw.get(key.partition(".")[0])
    kind = section.get("family") or section.get("name") if isinstance(section, dict) else section
    kind = ALIASES.get(str(kind)) or renamed_value("task", kind) or str(kind)
    messages = renamed_recipe_key_message(key, kind), renamed_value_message(key, value)
    return [message for message in messages if message is not None]


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each leaf of a mapping; the items of a list have the key of the list."""
    if isinstance(value, dict) and (value or not key):
        for name, item in value.items():
            yield from leaves(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and value:
        for item in value:
            yield from leaves(item, key)
    else:
        yield key, value
