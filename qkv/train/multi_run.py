"""Several runs of one recipe, with different seeds or different folds held out: mean and deviation of each metric."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from qkv.errors import InputError
from qkv.recipe.schema import Recipe
from qkv.train.run_log import LOG, parse_record
from qkv.train.workload import workload_class

# fields of a log record that are no metrics
_RUN_KEYS = (
    *("kind", "step", "max_steps", "seconds", "samples", "tokens"),
    *("best_step", "num_averaged_checkpoints", "validations_since_best"),
)


class RunVariant(NamedTuple):
    """One of several runs."""

    name: str  # such as seed1 or fold1of5
    recipe: Recipe
    folder: Path


def with_seeds(recipe: Recipe, folder: Path, count: int) -> Iterator[RunVariant]:
    """Yield `count` runs: with the recipe's seed and with those after it."""
    for seed in range(recipe.seed, recipe.seed + count):
        yield RunVariant(f"seed{seed}", replace(recipe, seed=seed), folder.with_name(f"{folder.name}-seed{seed}"))


def with_folds(recipe: Recipe, folder: Path, count: int) -> Iterator[RunVariant]:
    """Yield the runs of a cross-validation: each training example is held out in one of them."""
    for index, fold_recipe in enumerate(workload_class(recipe).fold_recipes(recipe, count), start=1):
        name = f"fold{index}of{count}"
        yield RunVariant(name, fold_recipe, folder.with_name(f"{folder.name}-{name}"))


def final_metrics(folder: Path) -> dict[str, float]:
    """Return the validation metrics of a finished run's weights, from its log."""
    path = folder / LOG
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.is_file() else []
    records = [record for record in map(parse_record, lines) if record is not None]
    record: dict[str, Any] = next((record for record in reversed(records) if record["kind"] == "final"), {})
    if not record.get("num_averaged_checkpoints"):  # else the record itself has all metrics of the averaged weights
        validations = [r for r in records if r["kind"] == "valid" and r["step"] == record.get("best_step")]
        record = validations[-1] if validations else {}
    if not record:
        raise InputError(
            f"{path}: the metrics of the finished run are missing or damaged; remove {folder} and run again"
        )
    return {name: value for name, value in record.items() if name not in _RUN_KEYS and isinstance(value, int | float)}


def summary(metrics_by_run: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return the values of each metric, one per run, with their mean and sample standard deviation."""
    result: dict[str, Any] = {"runs": list(metrics_by_run), "metrics": {}}
    for name in next(iter(metrics_by_run.values())):
        values = [metrics[name] for metrics in metrics_by_run.values()]
        result["metrics"][name] = {
            "values": values,
            "mean": statistics.fmean(values),
            "std": statistics.stdev(values),
        }
    return result


def render(result: Mapping[str, Any]) -> str:
    """Return a summary as a table of text, one row per metric."""
    width = max(len(name) for name in result["metrics"])
    columns = [*result["runs"], "mean", "std"]
    rows = [" " * width + "".join(f"  {name:>10}" for name in columns)]
    for name, stats in result["metrics"].items():
        numbers = [*stats["values"], stats["mean"], stats["std"]]
        rows.append(f"{name:<{width}}" + "".join(f"  {number:>10.4f}" for number in numbers))
    return "\n".join(rows)
