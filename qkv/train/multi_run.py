"""One recipe trained several times, with other seeds or other parts held out: each figure's mean and deviation."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from qkv.data.labels import LabeledExample
from qkv.errors import InputError
from qkv.recipe.schema import FinetuneRecipe, Recipe
from qkv.train.trainer import LOG
from qkv.train.workloads.finetuning import make_task
from qkv.train.workloads.task_data import fold_of, read_split

_RUN_KEYS = ("kind", "step", "seconds", "samples", "best_step", "num_averaged_checkpoints", "tokens")


class RunVariant(NamedTuple):
    """One of several runs."""

    name: str  # seed1, or fold1
    recipe: Recipe
    folder: Path


def with_seeds(recipe: Recipe, folder: Path, count: int) -> Iterator[RunVariant]:
    """The recipe's seed, and those after it."""
    for seed in range(recipe.seed, recipe.seed + count):
        yield RunVariant(f"seed{seed}", replace(recipe, seed=seed), folder.with_name(f"{folder.name}-seed{seed}"))


def with_folds(recipe: Recipe, folder: Path, count: int) -> Iterator[RunVariant]:
    """Cross-validation: each training example is held out once; a validation part that the recipe has is not used."""
    if not isinstance(recipe, FinetuneRecipe):
        raise InputError("--num-folds goes with tasks; this recipe is of another kind, give --num-seeds")
    hold_out = {name: fraction for name, fraction in recipe.data.hold_out.items() if name != "valid"}
    recipe = replace(recipe, data=replace(recipe.data, valid=None, hold_out=hold_out))
    check_folds(recipe, count)
    for index in range(1, count + 1):
        data = replace(recipe.data, fold=[index, count])
        name = f"fold{index}of{count}"
        yield RunVariant(name, replace(recipe, data=data), folder.with_name(f"{folder.name}-{name}"))


def check_folds(recipe: FinetuneRecipe, count: int) -> None:
    """Says before the first run which class a later one could not learn: one whose examples all lie in one fold."""
    if recipe.data.skip_bad:  # then they are left out, and listed
        return
    task, examples = make_task(recipe), read_split(replace(recipe.data, fold=None), "train")
    if not examples or not isinstance(examples[0], LabeledExample):
        return
    all_labels, folds = set(task.labels(examples)), [fold_of(example, recipe.data.group_by, count) for example in examples]
    for index in range(1, count + 1):
        train_examples = [example for example, fold in zip(examples, folds, strict=True) if fold != index]
        missing = sorted(all_labels.difference(task.labels(train_examples)))
        if missing:
            message = f"all examples of '{missing[0]}' lie in fold {index}, where nothing is left to learn it from"
            raise InputError(f"--num-folds: {message}; give more of them, or another number of folds")


def final_metrics(folder: Path) -> dict[str, float]:
    """What a finished run's weights scored on its held-out examples."""
    records = [json.loads(line) for line in (folder / LOG).read_text(encoding="utf-8").splitlines()]
    record = next(line for line in reversed(records) if line["kind"] == "final")
    if not record["num_averaged_checkpoints"]:  # else it says all that the averaged weights scored
        record = next(line for line in records if line["kind"] == "valid" and line["step"] == record["best_step"])
    return {name: value for name, value in record.items() if name not in _RUN_KEYS}


def summary(metrics_by_run: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Each figure's values, by run, with their mean and sample standard deviation."""
    names = next(iter(metrics_by_run.values()))
    result: dict[str, Any] = {"runs": list(metrics_by_run), "metrics": {}}
    for name in names:
        values = [run[name] for run in metrics_by_run.values()]
        result["metrics"][name] = {
            "values": values,
            "mean": statistics.fmean(values),
            "std": statistics.stdev(values),
        }
    return result


def render(result: Mapping[str, Any]) -> str:
    """The same as a table."""
    width = max(len(name) for name in result["metrics"])
    columns = [*result["runs"], "mean", "std"]
    rows = [" " * width + "".join(f"  {name:>10}" for name in columns)]
    for name, stats in result["metrics"].items():
        numbers = [*stats["values"], stats["mean"], stats["std"]]
        rows.append(f"{name:<{width}}" + "".join(f"  {number:>10.4f}" for number in numbers))
    return "\n".join(rows)
