"""One recipe trained several times, with other seeds or other parts held out: each figure's mean and deviation."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from qkv.data.labels import Classified
from qkv.errors import InputError
from qkv.train.fit import LOG
from qkv.train.sections import AnyRecipe, TaskRecipe
from qkv.train.task_data import fold_of, read_part
from qkv.train.tuning import task_of

_ABOUT_THE_RUN = ("kind", "step", "seconds", "samples", "best_step", "averaged", "tokens")


class One(NamedTuple):
    """One of several runs."""

    name: str  # seed1, or fold1
    recipe: AnyRecipe
    folder: Path


def with_seeds(recipe: AnyRecipe, folder: Path, count: int) -> Iterator[One]:
    """The recipe's seed, and those after it."""
    for seed in range(recipe.seed, recipe.seed + count):
        yield One(f"seed{seed}", replace(recipe, seed=seed), folder.with_name(f"{folder.name}-seed{seed}"))


def with_folds(recipe: AnyRecipe, folder: Path, count: int) -> Iterator[One]:
    """Cross-validation: each training example is held out once; a validation part that the recipe has is not used."""
    if not isinstance(recipe, TaskRecipe):
        raise InputError("--folds goes with tasks; this recipe is of another kind, give --seeds")
    rest = {name: share for name, share in recipe.data.hold_out.items() if name != "valid"}
    recipe = replace(recipe, data=replace(recipe.data, valid=None, hold_out=rest))
    check_folds(recipe, count)
    for number in range(1, count + 1):
        data = replace(recipe.data, fold=[number, count])
        name = f"fold{number}of{count}"
        yield One(name, replace(recipe, data=data), folder.with_name(f"{folder.name}-{name}"))


def check_folds(recipe: TaskRecipe, count: int) -> None:
    """Says before the first run which class a later one could not learn: one whose examples all lie in one fold."""
    if recipe.data.skip_bad:  # then they are left out, and listed
        return
    task, whole = task_of(recipe), read_part(replace(recipe.data, fold=None), "train")
    if not whole or not isinstance(whole[0], Classified):
        return
    every, folds = set(task.labels(whole)), [fold_of(one, recipe.data.together, count) for one in whole]
    for number in range(1, count + 1):
        rest = [one for one, fold in zip(whole, folds, strict=True) if fold != number]
        lone = sorted(every.difference(task.labels(rest)))
        if lone:
            said = f"all examples of '{lone[0]}' lie in fold {number}, where nothing is left to learn it from"
            raise InputError(f"--folds: {said}; give more of them, or another number of folds")


def figures(folder: Path) -> dict[str, float]:
    """What a finished run's weights scored on its held-out examples."""
    lines = [json.loads(line) for line in (folder / LOG).read_text(encoding="utf-8").splitlines()]
    kept = next(line for line in reversed(lines) if line["kind"] == "finish")
    if not kept["averaged"]:  # else it says all that the averaged weights scored
        kept = next(line for line in lines if line["kind"] == "valid" and line["step"] == kept["best_step"])
    return {name: value for name, value in kept.items() if name not in _ABOUT_THE_RUN}


def summary(found: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Each figure's values, by run, with their mean and sample standard deviation."""
    names = next(iter(found.values()))
    told: dict[str, Any] = {"runs": list(found), "figures": {}}
    for name in names:
        values = [run[name] for run in found.values()]
        told["figures"][name] = {
            "values": values,
            "mean": statistics.fmean(values),
            "deviation": statistics.stdev(values),
        }
    return told


def render(told: Mapping[str, Any]) -> str:
    """The same as a table."""
    wide = max(len(name) for name in told["figures"])
    columns = [*told["runs"], "mean", "deviation"]
    rows = [" " * wide + "".join(f"  {name:>10}" for name in columns)]
    for name, about in told["figures"].items():
        numbers = [*about["values"], about["mean"], about["deviation"]]
        rows.append(f"{name:<{wide}}" + "".join(f"  {number:>10.4f}" for number in numbers))
    return "\n".join(rows)
