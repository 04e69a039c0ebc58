"""The JSON schema of recipes, for editors: made from the dataclasses, with the sentence under each field."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from qkv import families
from qkv.recipe.model_section import DROPOUT_KEYS
from qkv.recipe.objectives import OBJECTIVE_CONFIGS
from qkv.recipe.reference import field_docs
from qkv.recipe.schema import RECIPE_CLASSES
from qkv.recipe.task_names import ALIASES, trainable_task_names
from qkv.score_functions import SCORE_FUNCTIONS

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_Schema = dict[str, Any]


def recipe_schema() -> _Schema:
    """Return the JSON schema of recipes, registered tasks, objectives, families and workloads included."""
    from pydantic import TypeAdapter

    # the recipe without a key of its own is the last: it is what remains
    recipe_classes = sorted(RECIPE_CLASSES.values(), key=lambda recipe_class: recipe_class.key == "")
    objective_classes = {name: OBJECTIVE_CONFIGS.get(name) for name in OBJECTIVE_CONFIGS.names()}
    adapters: list[Any] = [
        (cls, "validation", TypeAdapter(cls)) for cls in (*recipe_classes, *objective_classes.values())
    ]
    schemas, shared = TypeAdapter.json_schemas(adapters)
    definitions: _Schema = shared["$defs"]
    for cls in {cls for root, _, _ in adapters for cls in _dataclasses_in(root)}:
        _describe(definitions.get(cls.__name__), cls)
    references = {cls: schemas[cls, "validation"] for cls, _, _ in adapters}
    for cls in recipe_classes:
        _complete_recipe(definitions[cls.__name__])
    definitions["Task"] = _task_schema()
    definitions["Model"] = _model_schema()
    definitions["Objective"] = _objective_schema({name: references[cls] for name, cls in objective_classes.items()})
    return {
        "$schema": _DIALECT,
        "title": "qkv recipe",
        "type": "object",
        **_by_key([(cls.key, references[cls]) for cls in recipe_classes]),
        "$defs": definitions,
    }


def _by_key(alternatives: list[tuple[str, _Schema]]) -> _Schema:
    """Return a schema that depends on the first key that is present; the last alternative has none."""
    (key, schema), *others = alternatives
    return {"if": {"required": [key]}, "then": schema, "else": _by_key(others)} if others else schema


def _dataclasses_in(hint: Any) -> Iterator[type]:
    """Yield the dataclasses that a type is made of."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
        hints = typing.get_type_hints(hint)
        for field in dataclasses.fields(hint):
            yield from _dataclasses_in(hints[field.name])
    else:
        for argument in typing.get_args(hint):
            if argument is not hint:
                yield from _dataclasses_in(argument)


def _describe(schema: _Schema | None, cls: type) -> None:
    """Add the sentence of each field to a schema, in place, and remove the titles that repeat the names."""
    if schema is None:
        return
    schema.pop("title", None)
    docs = field_docs(cls)
    for name, field_schema in schema.get("properties", {}).items():
        field_schema.pop("title", None)
        if name in docs:
            field_schema["description"] = docs[name]


def _complete_recipe(schema: _Schema) -> None:
    """Adjust the schema of a recipe, in place: keys that may be missing, and sections that depend on names."""
    properties = schema["properties"]
    schema["required"] = [key for key in schema.get("required", ()) if key != "name"]  # by default the file's name
    for key, definition in (("task", "Task"), ("model", "Model"), ("objective", "Objective")):
        if key in properties:
            properties[key] = {"$ref": f"#/$defs/{definition}", "description": properties[key].get("description", "")}
    for key in ("tokenizer", "finetune", "validation", "test"):
        if key in properties and "anyOf" not in properties[key]:
            section = {name: properties[key].pop(name) for name in ("$ref",) if name in properties[key]}
            properties[key]["anyOf"] = [section, {"type": "null"}]


def _task_schema() -> _Schema:
    names = {"enum": [*trainable_task_names(), *ALIASES]}
    return {"anyOf": [names, {"type": "object", "properties": {"name": names}, "required": ["name"]}]}


def _objective_schema(references: dict[str, _Schema]) -> _Schema:
    properties = {name: {"anyOf": [reference, {"type": "null"}]} for name, reference in references.items()}
    sections = {"type": "object", "properties": properties, "additionalProperties": False, "minProperties": 1}
    return {"anyOf": [{"enum": list(references)}, sections]}


def _model_schema() -> _Schema:
    """Return the schema of `model`: one alternative per family, and a pretrained model."""
    dropout = {"type": "number", "minimum": 0, "exclusiveMaximum": 1}
    pretrained: _Schema = {
        "type": "object",
        "properties": {"init_from": {"type": "string"}, **dict.fromkeys(DROPOUT_KEYS, dropout)},
        "required": ["init_from"],
        "additionalProperties": False,
    }
    return {"anyOf": [pretrained, *(_family_schema(name) for name in families.names())]}


def _family_schema(name: str) -> _Schema:
    from pydantic import TypeAdapter

    family = families.get_family(name)
    schema = TypeAdapter(family.Config).json_schema()
    _describe(schema, family.Config)
    properties: _Schema = schema["properties"]
    for field_schema in properties.values():
        field_schema.pop("default", None)  # it depends on the size
    if "attention" in properties:
        properties["attention"]["anyOf"] = [{"enum": ["none", *SCORE_FUNCTIONS.names()]}]
    embeddings = {"type": "string", "description": "File of word vectors, the initial embeddings of these words."}
    fixed = {"family": {"const": name}, "size": {"enum": list(family.PRESETS)}, "embeddings": embeddings}
    properties = fixed | properties
    return {"type": "object", "properties": properties, "required": ["family"], "additionalProperties": False}
