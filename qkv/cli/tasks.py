"""What the commands know of tasks: which one a run was trained for, and where examples to judge come from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.tasks.task import Task

Columns = Annotated[
    list[str] | None,
    typer.Option("--column", metavar="WHAT=NAME", help="Of --format: a column or option, such as label=stars."),
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Leave out what cannot be read; count it and list it at the end.")
]


def recipe_of(run: Path) -> Any:
    """The recipe that a run was trained by."""
    from qkv.train import read_recipe

    if not run.is_dir():
        raise InputError(f"{run}: no such folder; train a model first (qkv train RECIPE), or check the path")
    return read_recipe(run / "recipe.yaml")


def trained_for(model: str) -> Task[Any] | None:
    """The task that a run's folder was trained for; None of any other model."""
    from qkv.train.sections import TaskRecipe
    from qkv.train.tuning import task_of

    folder = Path(model)
    if not (folder / "recipe.yaml").is_file():
        return None
    recipe = recipe_of(folder)
    return task_of(recipe) if isinstance(recipe, TaskRecipe) else None


def column_names(given: list[str] | None, **named: str | None) -> dict[str, Any]:
    """--column WHAT=NAME …, and those that have an option of their own."""
    found: dict[str, Any] = {what: name for what, name in named.items() if name is not None}
    for one in given or []:
        what, sign, name = one.partition("=")
        if not sign or not what:
            raise InputError(f"--column: '{one}' is not WHAT=NAME, such as label=stars")
        found[what] = {"true": True, "false": False, "none": None}.get(name, name)
    return found
