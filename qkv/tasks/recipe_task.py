"""The task of a fine-tuning recipe."""

from __future__ import annotations

from typing import Any

from qkv.errors import InputError
from qkv.recipe.schema import FinetuneRecipe
from qkv.tasks.base import Task, get_task
from qkv.tasks.benchmark_defaults import default_settings


def make_task(recipe: FinetuneRecipe, **overrides: Any) -> Task[Any]:
    """Make a recipe's task: its settings, the benchmark's usual ones where it has none, and `overrides`."""
    settings = dict(recipe.task)
    name = settings.pop("name", None)
    if name is None:
        raise InputError("key 'task.name' is missing")
    settings = default_settings(recipe.data.format, str(name)) | settings
    smoothing = recipe.train.label_smoothing
    if smoothing and "label_smoothing" in settings:
        raise InputError("train.label_smoothing and task.label_smoothing are the same setting; leave out one of them")
    if smoothing:
        settings["label_smoothing"] = smoothing
    try:
        return get_task(str(name), **settings, **overrides)
    except TypeError as error:
        if smoothing and "label_smoothing" in str(error):
            raise InputError(f"train.label_smoothing: the task {name} has no such setting; set it to 0 here") from None
        raise InputError(f"task: {name}: {error}") from None
