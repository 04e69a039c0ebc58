"""`qkv recipes`: the recipes that come with qkv, and the JSON schema of recipes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from qkv.cli.help import add_command, make_app
from qkv.cli.list_names import list_names
from qkv.cli.options import Json


def _complete_recipe(incomplete: str) -> list[str]:
    from qkv.recipe.packaged import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of a packaged recipe.", autocompletion=_complete_recipe)
]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder to copy the recipe to.")]


def list_recipes(as_json: Json = False) -> None:
    """List the packaged recipes, each with one line.

    Example:
        qkv recipes list
    """
    list_names("recipes", as_json)


def show(name: Name) -> None:
    """Print a packaged recipe.

    Example:
        qkv recipes show g2p-demo
    """
    from qkv.files import read_text_file
    from qkv.recipe.packaged import packaged_recipe

    sys.stdout.write(read_text_file(packaged_recipe(name)))


def copy(name: Name, folder: Folder = Path()) -> None:
    """Copy a packaged recipe to a folder, to change it there.

    Example:
        qkv recipes copy g2p-demo recipes
    """
    from qkv.recipe.packaged import copy_recipe

    print(f"copied to {copy_recipe(name, folder)}")


def schema() -> None:
    """Print the JSON schema of recipes, for editors that complete and check YAML.

    Write it to a file, such as recipe.schema.json, and begin a recipe with the line
    "# yaml-language-server: $schema=recipe.schema.json".

    Example:
        qkv recipes schema
    """
    from qkv.recipe.json_schema import recipe_schema

    print(json.dumps(recipe_schema(), indent=2))


app = make_app(
    """List, show and copy the recipes that come with qkv.

    Without a command, they are listed. A recipe can be trained by its name: qkv train g2p-demo.

    Examples:
        qkv recipes
        qkv recipes show g2p-demo
        qkv recipes copy g2p-demo
    """,
    no_args_is_help=False,
)


@app.callback(invoke_without_command=True)
def _list_by_default(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_recipes()


add_command(app, "list", list_recipes)
add_command(app, "show", show)
add_command(app, "copy", copy)
add_command(app, "schema", schema)
