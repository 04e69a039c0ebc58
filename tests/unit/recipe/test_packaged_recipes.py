"""The recipes that come with qkv, and the JSON schema of recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from qkv.errors import InputError
from qkv.recipe import read_recipe
from qkv.recipe.json_schema import recipe_schema
from qkv.recipe.packaged import LIBRARY, copy_recipe, describe_recipe, find_recipe, packaged_recipe, recipe_names
from qkv.recipe.reference import field_docs
from qkv.recipe.training import TrainConfig

SCHEMA = recipe_schema()


@pytest.mark.parametrize("name", recipe_names())
def test_a_packaged_recipe_describes_itself_and_its_data(name: str) -> None:
    head = [line for line in packaged_recipe(name).read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert any(line.startswith("# Data: ") for line in head), "where is its data violations?"
    assert any(line.startswith("# Your own") for line in head), "how is it pointed at one's own data?"
    assert 20 < len(describe_recipe(name)) < 200
    assert read_recipe(name).name == name


def test_a_recipe_is_found_by_its_name_unless_a_file_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe("g2p-demo") == LIBRARY / "g2p-demo.yaml"
    Path("g2p-demo").write_text("name: mine")
    assert find_recipe("g2p-demo") == Path("g2p-demo")
    with pytest.raises(InputError, match="no such recipe; did you mean 'g2p-demo'"):
        find_recipe("g2p-dmo")


def test_a_copy_overwrites_nothing(tmp_path: Path) -> None:
    copied = copy_recipe("g2p-demo", tmp_path / "new")
    assert copied.read_text(encoding="utf-8") == packaged_recipe("g2p-demo").read_text(encoding="utf-8")
    with pytest.raises(InputError, match="already exists"):
        copy_recipe("g2p-demo", tmp_path / "new")
    with pytest.raises(InputError, match="is a file"):
        copy_recipe("arc", copied)


# ---- JSON schema: a small validator of the keywords that the schema uses --------------------------------------------

TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}


def errors(value: Any, schema: Any, path: str = "") -> list[str]:
    """Return the violations of a schema; every keyword of the schema must be known here."""
    if schema is True:
        return []
    known = {"$schema", "$defs", "title", "description", "default", "propertyNames", "minLength"}
    known |= {"exclusiveMinimum", "exclusiveMaximum", "minimum", "maximum", "minItems", "maxItems", "minProperties"}
    known |= {"$ref", "if", "then", "else", "anyOf", "type", "enum", "const", "properties", "required"}
    known |= {"additionalProperties", "items"}
    assert set(schema) <= known, set(schema) - known
    if "$ref" in schema:
        return errors(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], path)
    violations = []
    if "if" in schema:
        violations += errors(value, schema["else" if errors(value, schema["if"], path) else "then"], path)
    if "anyOf" in schema:
        alternatives = [errors(value, option, path) for option in schema["anyOf"]]
        violations += [] if [] in alternatives else min(alternatives, key=len)
    if schema.get("type") == "null":
        return violations + ([] if value is None else [f"{path}: not null"])
    if "type" in schema and (
        not isinstance(value, TYPES[schema["type"]]) or (isinstance(value, bool) and schema["type"] != "boolean")
    ):
        return [*violations, f"{path}: not a {schema['type']}: {value!r}"]
    if "enum" in schema and value not in schema["enum"]:
        violations.append(f"{path}: {value!r} is not one of {schema['enum']}")
    if "const" in schema and value != schema["const"]:
        violations.append(f"{path}: {value!r} is not {schema['const']}")
    if value < schema["minimum"] if "minimum" in schema else False:
        violations.append(f"{path}: {value} is too small")
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        violations += [f"{path}.{key} is missing" for key in schema.get("required", ()) if key not in value]
        for key, item in value.items():
            violations += (
                errors(item, properties.get(key, schema.get("additionalProperties", True) or False), f"{path}.{key}")
                if key in properties or schema.get("additionalProperties", True) is not False
                else [f"unknown {path}.{key}"]
            )
    if isinstance(value, list):
        violations += [error for item in value for error in errors(item, schema.get("items", True), path)]
    return violations


@pytest.mark.parametrize("name", recipe_names())
def test_every_packaged_recipe_fits_the_json_schema(name: str) -> None:
    assert errors(yaml.safe_load(packaged_recipe(name).read_text(encoding="utf-8")), SCHEMA) == []


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"trian": {}}, "unknown .trian"),
        ({"train": {"max_stepps": 3}}, "unknown .train.max_stepps"),
        ({"train": {"max_steps": 0}}, ".train.max_steps: 0 is too small"),
        ({"train": {"optimizer": "rmsprop"}}, ".train.optimizer: 'rmsprop' is not one of"),
        ({"model": {"family": "bret"}}, ".model.family: 'bret' is not"),
        ({"data": None}, ".data: not a object"),
    ],
)
def test_the_json_schema_refuses_what_the_parser_refuses(change: dict[str, Any], error: str) -> None:
    raw = yaml.safe_load(packaged_recipe("g2p-demo").read_text(encoding="utf-8")) | change
    assert any(error in message for message in errors(raw, SCHEMA)), errors(raw, SCHEMA)


def test_the_json_schema_has_the_sentence_of_every_key() -> None:
    docs = field_docs(TrainConfig)
    assert {key: schema["description"] for key, schema in SCHEMA["$defs"]["TrainConfig"]["properties"].items()} == docs
