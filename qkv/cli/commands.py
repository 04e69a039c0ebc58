"""All commands of the command line, and the options that precede them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

import typer

from qkv.cli import (
    cost,
    data,
    embed,
    families,
    import_export,
    list_names,
    log_probs,
    plot,
    predict,
    prompt,
    recipes,
    score,
    similar,
    sweep,
    tokenizer,
    train,
)
from qkv.cli import eval as eval_module
from qkv.cli.help import add_command, make_app
from qkv.errors import did_you_mean, quote
from qkv.foreign_names import option_hint
from qkv.registry import load_plugins
from qkv.renamed import renamed_command, renamed_option

_DESCRIPTION = """Train, use, evaluate and inspect attention models.

Examples:
    qkv train g2p-demo
    qkv predict runs/g2p-demo attention
    qkv eval runs/g2p-demo
    qkv COMMAND --help
"""
_COMMANDS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Train and prepare data": {
        "train": train.train,
        "sweep": sweep.sweep,
        "recipes": recipes.app,
        "data": data.app,
        "list": list_names.list_names,
    },
    "Use a model": {
        "predict": predict.predict,
        "embed": embed.embed,
        "similar": similar.similar,
        "prompt": prompt.prompt,
    },
    "Evaluate and inspect": {
        "eval": eval_module.eval_command,
        "score": score.score,
        "log-probs": log_probs.log_probs,
        "plot": plot.plot,
        "cost": cost.cost,
    },
    "Checkpoints and tokenizers": {
        "families": families.list_families,
        "import": import_export.import_checkpoint,
        "export": import_export.export_checkpoint,
        "tokenizer": tokenizer.app,
    },
}
_RECIPE_COMMANDS = ("train", "sweep", "cost")  # take KEY=VALUE changes of a recipe

app = make_app(_DESCRIPTION, add_completion=True)
for _panel, _commands in _COMMANDS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, rich_help_panel=_panel)
        else:
            add_command(app, _name, _command, _panel)


@app.callback(invoke_without_command=True)
def global_options(
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            envvar="QKV_IMPORT",
            help="Import a module that registers tasks, metrics or other extensions with qkv.register (repeatable).",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the versions of qkv and torch and exit.", is_eager=True)
    ] = False,
) -> None:
    """Run the options that precede the command."""
    load_plugins(imports or [])
    if version:
        import torch

        from qkv import __version__

        print(f"qkv {__version__}, torch {torch.__version__}")
        raise typer.Exit


def usage_message(error: Any) -> str:
    """Return one line for an error of typer: an unknown option or command with the new or the nearest name.

    The message is empty if the help has been printed instead.
    """
    message = error.format_message()
    context, option = getattr(error, "ctx", None), getattr(error, "option_name", None)
    if not message or context is None:
        return f"qkv: {message} (see qkv --help)" if message else ""
    see_help = f"see {context.command_path} --help"
    unknown_command = re.match(r"No such command '(.+?)'", message)
    if unknown_command:
        name = unknown_command[1]
        new_command = renamed_command(name) if context.parent is None else None
        hint = did_you_mean(name, context.command.commands)
        return f"qkv: the command {name} is now {new_command}" if new_command else f"qkv: no command '{name}'; {hint}"
    if option is None or not message.startswith("No such option"):
        return f"qkv: {message.rstrip('.')}; {see_help}"
    options = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
    new_option = renamed_option(option, context.command.name)
    if new_option in options:
        return f"qkv: {option} is now {new_option}"
    recipe_key = _recipe_key(option) if context.command.name in _RECIPE_COMMANDS else None
    foreign_hint = option_hint(option, options, recipe_key)
    if foreign_hint is not None:
        return f"qkv: no option {quote(option)}; {foreign_hint}"
    hint = did_you_mean(option[:60], options)
    return f"qkv: no option {quote(option)}; {hint if hint.endswith('?') else see_help}"


def _recipe_key(option: str) -> str | None:
    """Return the dotted key of a recipe that an unknown option names."""
    from qkv.recipe.messages import find_key

    return find_key(option.lstrip("-").replace("-", "_"))
