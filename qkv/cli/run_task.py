"""What the commands know of tasks: which one a run was trained for, and where examples to judge come from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.tasks.base import Task

ReaderOptions = Annotated[
    list[str] | None,
    typer.Option("--reader-option", metavar="KEY=VALUE", help="Of --format: a column or option, such as label=stars."),
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Leave out what cannot be read; count it and list it at the end.")
]


def load_run_recipe(run: Path) -> Any:
    """The recipe that a run was trained by."""
    from qkv.recipe import read_recipe

    if not run.is_dir():
        raise InputError(f"{run}: no such folder; train a model first (qkv train RECIPE), or check the path")
    return read_recipe(run / "recipe.yaml")


def task_of_run(model: str) -> Task[Any] | None:
    """The task that a run's folder was trained for; None of any other model."""
    from qkv.recipe.schema import FinetuneRecipe
    from qkv.train.workloads.finetuning import make_task

    folder = Path(model)
    if not (folder / "recipe.yaml").is_file():
        return None
    recipe = load_run_recipe(folder)
    return make_task(recipe) if isinstance(recipe, FinetuneRecipe) else None


def parse_reader_options(options: list[str] | None, **named: str | None) -> dict[str, Any]:
    """--reader-option KEY=VALUE …, and those that have an option of their own."""
    parsed: dict[str, Any] = {key: value for key, value in named.items() if value is not None}
    for option in options or []:
        key, equals, value = option.partition("=")
        if not equals or not key:
            raise InputError(f"--reader-option: '{option}' is not KEY=VALUE, such as label=stars")
        parsed[key] = {"true": True, "false": False, "none": None}.get(value, value)
    return parsed
