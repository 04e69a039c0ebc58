"""Turn the arguments of `qkv.fit` into a validated recipe, and data in memory into examples."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from qkv.data.examples import Examples
from qkv.data.formats import infer_format, reader_options
from qkv.data.formats.in_memory import read_rows
from qkv.data.pair import Pair
from qkv.errors import InputError, check_names, check_path, check_type, describe_value
from qkv.files import parse_yaml
from qkv.recipe.data_options import IN_MEMORY
from qkv.recipe.parse import apply_overrides, read_raw_recipe, recipe_to_yaml, validate_recipe
from qkv.recipe.schema import BaseRecipe, FinetuneRecipe, Recipe, Seq2SeqRecipe
from qkv.recipe.task_names import resolve_task_name
from qkv.tasks.base import get_task
from qkv.train.auto_recipe import fill_defaults
from qkv.train.workloads.pair_data import divide_pairs
from qkv.train.workloads.task_data import divide

_LOCATION = "the recipe"
_SPLIT_NAMES = {"train": "train", "valid": "valid", "validation": "valid", "dev": "valid", "test": "test"}
_LIKE_ROWS = "rows.parquet"  # a file whose format has the same fields as rows in memory


class FitPlan(NamedTuple):
    """What a run trains."""

    recipe: Recipe
    examples: dict[str, Any] | None  # the splits of its data, as its workload takes them; None: they are in files


def make_plan(
    recipe: Any,
    *,
    task: str | None = None,
    init_from: str | Path | None = None,
    data: Any = None,
    columns: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
) -> FitPlan:
    """Return the recipe that the arguments of `qkv.fit` describe, and its examples if they were read for it."""
    if isinstance(recipe, BaseRecipe) and _is_read(data):
        return FitPlan(cast("Recipe", recipe), data)
    changes = _as_overrides(overrides)
    raw = _raw_recipe(recipe, task, init_from)
    is_automatic = "task" in raw and not raw.get("train")
    if columns is not None:
        check_type(columns, Mapping, "columns", "a dict of columns by field")
        raw["data"] = {**(raw.get("data") or {}), "columns": dict(columns)}
    splits = None if data is None or isinstance(data, str | os.PathLike) else _as_splits(data)
    if splits is not None:
        raw["data"] = _data_section(raw, dict.fromkeys(splits, IN_MEMORY), _LIKE_ROWS)
    elif data is not None:
        path = str(check_path(data, "data", "a table or a file"))
        raw["data"] = _data_section(raw, {"train": path}, path)
    apply_overrides(raw, changes)
    read = None if splits is None else partial(_read_splits, splits)
    if is_automatic:
        automatic = fill_defaults(raw, read)
        return FitPlan(validate_recipe(automatic.raw, _LOCATION), automatic.data)
    parsed = validate_recipe(raw, _LOCATION)
    return FitPlan(parsed, None if read is None else read(parsed))


def _is_read(data: Any) -> bool:
    """Return whether data are examples that were read with the recipe, as `qkv train --task` has them."""
    return data is None or (isinstance(data, dict) and all(isinstance(split, Examples) for split in data.values()))


def _as_overrides(overrides: Any) -> list[str]:
    if isinstance(overrides, Mapping):
        return [f"{key}={value}" for key, value in overrides.items()]
    return check_names(overrides, "overrides", 'changes such as {"train.epochs": 3}')


def _raw_recipe(recipe: Any, task: str | None, init_from: str | Path | None) -> dict[str, Any]:
    """Return the recipe as a mapping that may be changed."""
    if recipe is None:
        check_type(task, str, "task", "the name of a task, or a recipe instead")
        model = {} if init_from is None else {"init_from": str(check_path(init_from, "init_from", "a model's folder"))}
        return {"name": resolve_task_name(str(task)), "task": task, "model": model}
    if task is not None or init_from is not None:
        raise InputError("a recipe names its task and model; leave out task and init_from, or the recipe")
    if isinstance(recipe, Mapping):
        raw: dict[str, Any] = {str(key): value for key, value in recipe.items()}
        return raw if "name" in raw else {"name": _task_name(raw) or "run"} | raw
    if not isinstance(recipe, BaseRecipe):
        return read_raw_recipe(check_path(recipe, "recipe", "a recipe, a mapping or the path of a YAML file"))
    raw = parse_yaml(recipe_to_yaml(cast("Recipe", recipe)), _LOCATION)
    return raw


def _task_name(raw: Mapping[str, Any]) -> str | None:
    task = raw.get("task")
    name = task.get("name") if isinstance(task, Mapping) else task
    return resolve_task_name(name) if isinstance(name, str) else None


# ---- data in memory -------------------------------------------------------------------------------------------------


def _as_splits(data: Any) -> dict[str, Any]:
    """Return the tables of the splits "train", "valid" and "test"; a single table is the training data."""
    if not isinstance(data, Mapping) or "train" not in data:
        return {"train": data}
    unknown = next((name for name in data if name not in _SPLIT_NAMES), None)
    if unknown is not None:
        raise InputError(f"data: there is no split {describe_value(unknown)}; give train, valid and test")
    return {_SPLIT_NAMES[name]: table for name, table in data.items()}


def _data_section(raw: Mapping[str, Any], files: Mapping[str, str], path: str) -> dict[str, Any]:
    """Return the section `data` of a recipe with other data.

    Args:
        raw: the recipe.
        files: the file of each split.
        path: a file whose name shows the format, if the recipe names none.
    """
    if "objective" in raw:
        raise InputError("data: pretraining reads files; name them in the recipe, data.train")
    section = {key: value for key, value in (raw.get("data") or {}).items() if key not in _SPLIT_NAMES}
    name = _task_name(raw)
    if name is None:
        section.setdefault("format", infer_format(Pair, path).removeprefix("pairs:"))
    else:
        section.setdefault("format", infer_format(get_task(name).example_type, path))
        if name == "regression" and "regression" in reader_options(section["format"]):
            section["columns"] = {"regression": True} | (section.get("columns") or {})
    return section | dict(files)


def _read_splits(splits: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Read the tables of a recipe, as its workload takes them: the splits "train" and "valid"."""
    if isinstance(recipe, Seq2SeqRecipe):
        pair_format = infer_format(Pair, _LIKE_ROWS)
        pairs = {name: read_rows(table, pair_format, Pair, recipe.data.columns) for name, table in splits.items()}
        return divide_pairs(recipe.data, pairs)
    assert isinstance(recipe, FinetuneRecipe)  # `_data_section` refuses pretraining
    data, example_type = recipe.data, get_task(recipe.task["name"]).example_type
    examples = {name: read_rows(table, data.format, example_type, data.columns) for name, table in splits.items()}
    if "valid" in examples:
        return {"train": examples["train"], "valid": examples["valid"]}
    divided = divide(examples["train"], data)
    return {name: Examples(divided[name], list(examples["train"].skipped)) for name in ("train", "valid")}
