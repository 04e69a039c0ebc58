"""A recipe: everything that decides a run, as a commented YAML file read into dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from qkv import families, spec
from qkv.errors import InputError, nearest
from qkv.train.schedule import paper_peak
from qkv.train.sections import AnyRecipe, PairRecipe, Recipe, TaskRecipe, TextRecipe


def read_recipe(path: str | Path, changes: list[str] | None = None) -> AnyRecipe:
    """A recipe file with `key=value` changes on top; an unknown key is refused with the nearest known one."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such recipe")
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise InputError(f"{path}{line}: not YAML: {getattr(error, 'problem', None) or error}") from None
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path}: a recipe is a mapping of keys to values")
    apply(raw, changes or [])
    raw.setdefault("name", path.stem)
    return checked(raw, str(path))


def checked(raw: dict[str, Any], where: str) -> AnyRecipe:
    """A mapping as a recipe, its model's keys included: a wrong one is found now, not after the data is read."""
    recipe = from_plain(raw, where)
    shape(recipe, where)
    return recipe


def apply(raw: dict[str, Any], changes: Iterable[str]) -> None:
    """Puts `key=value` changes into a mapping."""
    for change in changes:
        _change(raw, change)


def _change(raw: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals or not key:
        raise InputError(f"'{change}': changes are written key=value, such as train.steps=100")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise InputError(f"'{change}': the value is not YAML") from None
    *parents, last = key.split(".")
    place = raw
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise InputError(f"'{change}': {parent} is a value, not a section")
    place[last] = value


def from_plain(raw: dict[str, Any], where: str) -> AnyRecipe:
    """A mapping as read from YAML or JSON, checked; with `objective` it is about text."""
    from pydantic import TypeAdapter, ValidationError

    kind: Any = TextRecipe if "objective" in raw else TaskRecipe if "task" in raw else PairRecipe
    if isinstance(raw.get("task"), str):
        raw = raw | {"task": {"name": raw["task"]}}
    named = raw.get("objective")
    if isinstance(named, str):  # the objective as its paper has it
        raw = raw | {"objective": {named: {}}}
    elif isinstance(named, dict):
        raw = raw | {"objective": {name: {} if value is None else value for name, value in named.items()}}
    try:
        found: AnyRecipe = TypeAdapter(kind).validate_python(raw)
    except ValidationError as error:
        first = error.errors()[0]
        # of a value that may be of several types, pydantic names the type behind the key
        key = ".".join(str(part) for part in first["loc"] if part != "str" and not str(part).startswith("list["))
        raise InputError(f"{where}: {_explain(key, first, kind)}") from None
    if found.train.epochs is not None and not isinstance(found, TaskRecipe):
        raise InputError(f"{where}: train.epochs: goes with tasks; give train.steps here")
    if isinstance(found, TextRecipe) and not found.objective.chosen:
        raise InputError(f"{where}: key 'objective' names none; known: causal, masked, denoise, span")
    return found


def _explain(key: str, error: Any, kind: Any) -> str:
    *parents, last = key.split(".")
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = _section(kind, parents)
        return f"unknown key '{key}'; {nearest(last, known)}"
    if error["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"key '{key}' is missing"
    if error["type"] == "value_error":  # ours, which says what the value is and what it may be
        return f"key '{key}': {error['ctx']['error']}"
    message = error["msg"]
    if error["type"] == "dataclass_type":
        message = f"it is a section of keys: {', '.join(_section(kind, key.split('.')))}"
    return f"key '{key}' cannot be {error['input']!r}: {message[:1].lower()}{message[1:]}"


def _section(kind: Any, parents: list[str]) -> list[str]:
    """The keys that may stand under others."""
    for parent in parents:
        hint = typing.get_type_hints(kind).get(parent, kind)
        options = [part for part in typing.get_args(hint) or (hint,) if dataclasses.is_dataclass(part)]
        kind = options[0] if options else kind
    return [f.name for f in dataclasses.fields(kind)]


def shape(recipe: Recipe, where: str = "recipe") -> Any:
    """The model's shape: the family's size with the recipe's changes."""
    from pydantic import TypeAdapter, ValidationError

    fields = dict(recipe.model)
    if "from" in fields:
        others = sorted(set(fields) - {"from", *DROPOUT})
        if others:
            said = f"a model that is there has its shape, but for dropout; leave out {', '.join(others)}"
            raise InputError(f"{where}: model.from: {said}")
        for key in DROPOUT:
            _check_share(fields.get(key, 0.0), key, where)
        return None
    name, size = fields.pop("family", None), fields.pop("size", None)
    if name is None:
        known = ", ".join(families.names())
        raise InputError(
            f"{where}: key 'model.family' is missing (or model.from, a model that is there); known: {known}"
        )
    module = families.family(str(name))
    size = ("base" if "base" in module.SIZES else next(iter(module.SIZES))) if size is None else size
    if str(size) not in module.SIZES:
        raise InputError(f"{where}: model.size: {name} has no size '{size}'; {nearest(str(size), module.SIZES)}")
    known = {f.name: getattr(module.SIZES[size], f.name) for f in dataclasses.fields(module.Shape)}
    for key in fields:
        if key not in known:
            raise InputError(f"{where}: unknown key 'model.{key}'; {nearest(key, [*known, 'family', 'size'])}")
    try:
        found = TypeAdapter(module.Shape).validate_python(known | fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{where}: {_explain('.'.join(['model', *map(str, first['loc'])]), first, Recipe)}") from None
    for key in fields:
        value = getattr(found, key)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise InputError(f"{where}: key 'model.{key}' cannot be {value}: it counts something; give 1 or more")
        if isinstance(value, float):
            _check_share(value, key, where)
    return found


DROPOUT = ("dropout", "attention_dropout")  # what may change of a model that is there


def _check_share(value: Any, key: str, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise InputError(f"{where}: key 'model.{key}' cannot be {value}: it is a share; give 0 or more, under 1")


def model_spec(recipe: Recipe, **given: int) -> spec.Model:
    """What the recipe's model is, for vocabularies of these sizes (`source`, `target`) and these `start` and `end`."""
    module = families.family(recipe.model["family"])
    if not {"source", "target", "start", "end"} <= set(inspect.signature(module.spec).parameters):
        raise InputError(f"model.family: {recipe.model['family']} is no encoder-decoder, and these pairs need one")
    found: spec.Model = module.spec(shape(recipe), **given)
    return found


def peak(recipe: Recipe, s: spec.Model) -> float:
    """The learning rate's peak: given, or the paper's for this width."""
    if recipe.train.paper_rate is None:
        return recipe.train.learning_rate
    width = (s.target or s.source).width  # type: ignore[union-attr]  # a model has one of them
    if not recipe.train.warmup:
        raise InputError("train.paper_rate: the paper's schedule needs a warm-up; set train.warmup to 1 or more")
    return paper_peak(width, recipe.train.warmup, recipe.train.paper_rate)


def to_yaml(recipe: AnyRecipe) -> str:
    """The recipe as it was run, changes included."""
    plain = json.loads(json.dumps(dataclasses.asdict(recipe)))
    if "objective" in plain:  # what is not chosen reads back as chosen with its paper's figures
        plain["objective"] = {name: how for name, how in plain["objective"].items() if how is not None}
    return as_yaml(plain)


def as_yaml(plain: dict[str, Any]) -> str:
    """A mapping as a recipe file has it."""
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
