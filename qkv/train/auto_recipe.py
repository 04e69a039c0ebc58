"""Make a fine-tuning recipe from a task, a file and a model, for `qkv train --task … --data … --init-from …`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qkv.data.examples import Examples
from qkv.data.formats import has_splits, infer_format, read_files, reader_options
from qkv.errors import InputError
from qkv.recipe.data_options import READER_KEYS
from qkv.recipe.parse import apply_overrides, parse_recipe
from qkv.recipe.schema import FinetuneRecipe
from qkv.recipe.task_names import resolve_task_name
from qkv.tasks.base import get_task
from qkv.train.finetune_defaults import finetune_defaults
from qkv.train.workloads.task_data import read_splits

_HELD_OUT_FRACTION = 0.1


class AutoRecipe(NamedTuple):
    """A recipe as a mapping, and the data that was read to make it."""

    raw: dict[str, Any]
    data: dict[str, Examples[Any]]  # the splits "train" and "valid", for `qkv.fit(…, data=…)`


def make_recipe(
    task: str,
    data: str,
    init_from: str | None,
    overrides: Sequence[str] = (),
    *,
    valid: str | None = None,
    format: str | None = None,
    columns: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
) -> AutoRecipe:
    """Make a recipe with settings that fit the size of the dataset and of the model.

    Args:
        task: name or alias of a task.
        data: training file or folder.
        init_from: pretrained model; None: `overrides` describe a new one.
        overrides: `key=value` changes, which take precedence.
        valid: validation file; None: the folder's validation split, or a tenth of the examples.
        format: format of the files; None: inferred from the file name.
        columns: names of the columns and other options of the format.
        skip_bad: skip examples that cannot be read.
    """
    task = resolve_task_name(task)
    data_section: dict[str, Any] = {"format": format or infer_format(get_task(task).example_type, data), "train": data}
    column_options = dict(columns or {})
    if task == "regression" and "regression" in reader_options(data_section["format"]):
        column_options["regression"] = True
    data_section |= {key: column_options.pop(key) for key in READER_KEYS if key in column_options}
    data_section |= ({"columns": column_options} if column_options else {}) | ({"skip_bad": True} if skip_bad else {})
    data_section |= {} if valid is None else {"valid": valid}
    raw: dict[str, Any] = {"name": f"{task}-{Path(data).name.partition('.')[0]}", "task": {"name": task}}
    raw["model"] = {} if init_from is None else {"init_from": init_from}
    raw |= {"data": data_section, "train": {}}
    apply_overrides(raw, overrides)
    return fill_defaults(raw)


def fill_defaults(
    raw: dict[str, Any], read: Callable[[FinetuneRecipe], dict[str, Examples[Any]]] | None = None
) -> AutoRecipe:
    """Fill in what a task's recipe leaves open: the validation split, and the settings of training.

    Args:
        raw: the recipe as a mapping, which is changed.
        read: reads the splits "train" and "valid" of data that is not in files.
    """
    raw["train"] = dict(raw.get("train") or {})
    examples = _read_examples(raw) if read is None else read(_parse(_with_held_out(raw)))
    defaults = finetune_defaults(_parse(raw), examples["train"])
    for section, values in defaults._asdict().items():
        if section == "validation" and (raw.get("validation") or {}).get("patience") is not None:
            continue  # a run that may stop early keeps its best weights
        if values or section in raw:
            raw[section] = values | (raw.get(section) or {})
    for override, default in {
        "max_steps": "epochs",
        "warmup_steps": "warmup_ratio",
        "batch_size": "batch_tokens",
    }.items():
        if override in raw["train"]:
            del raw["train"][default]
    return AutoRecipe(raw, examples)


def _parse(raw: Mapping[str, Any]) -> FinetuneRecipe:
    """Parse a recipe whose section `train` is not complete yet."""
    recipe = parse_recipe(dict(raw) | {"train": {"max_steps": 1}}, "the command line")
    assert isinstance(recipe, FinetuneRecipe)  # it has a task
    return recipe


def _read_examples(raw: dict[str, Any]) -> dict[str, Examples[Any]]:
    """Read the training and validation examples; if there is no validation split, a tenth is held out."""
    recipe, section = _parse(raw), raw["data"]
    if section.get("valid") is None and section.get("fold") is None and "valid" not in section.get("hold_out", {}):
        if all(has_splits(recipe.data.format, path) for path in _as_list(recipe.data.train)):
            try:
                return read_splits(recipe.data, ("valid", "train"))
            except InputError:
                if _has_valid_split(recipe):
                    raise
        _with_held_out(raw)
    return read_splits(_parse(raw).data, ("train", "valid"))


def _with_held_out(raw: dict[str, Any]) -> dict[str, Any]:
    """Hold out a tenth of the training data unless the recipe has validation data."""
    section = raw["data"]
    if section.get("valid") is None and section.get("fold") is None:
        section["hold_out"] = {"valid": _HELD_OUT_FRACTION} | (section.get("hold_out") or {})
    return raw


def _has_valid_split(recipe: FinetuneRecipe) -> bool:
    """Return whether a folder has a validation split, possibly with records that cannot be read."""
    data = recipe.data
    try:
        read_files(data.format, data.train, split="dev", columns=data.reader_options, skip_bad=True)
    except InputError:
        return False
    return True


def _as_list(paths: str | list[str]) -> list[str]:
    return [paths] if isinstance(paths, str) else paths
