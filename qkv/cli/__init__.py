"""The command line. A mistake of the user's is one line and exit code 2."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any

import typer

from qkv.cli import cost, data, embed, families, import_export, plot, predict, prompt, score, tokenizer, train
from qkv.cli import eval as eval_module
from qkv.errors import InputError, one_line
from qkv.renamed import renamed_command, renamed_option

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Attention models: train them, use them, score them, watch them attend.",
)
for name, command in {
    "train": train.train,
    "predict": predict.predict,
    "embed": embed.embed,
    "eval": eval_module.eval_command,
    "score": score.score,
    "prompt": prompt.prompt,
    "plot": plot.plot,
    "cost": cost.cost,
    "families": families.list_families,
    "import": import_export.import_checkpoint,
    "export": import_export.export_checkpoint,
}.items():
    app.command(name)(command)
app.add_typer(tokenizer.app, name="tokenizer")
app.add_typer(data.app, name="data")


@app.callback(invoke_without_command=True)
def show_version(
    version: Annotated[bool, typer.Option("--version", help="The version, and torch's.", is_eager=True)] = False,
) -> None:
    if version:
        import torch

        from qkv import __version__

        print(f"qkv {__version__}, torch {torch.__version__}")
        raise typer.Exit


_INTERRUPT_CODE = 130  # what shells give for Ctrl-C
_STOPPED_MESSAGE = "qkv: stopped; a training run goes on from its last checkpoint when the same command is given again"


def main() -> None:
    """The entry point: says a user's mistake in one line."""
    try:
        code = app(standalone_mode=False) or 0
        _exit(_STOPPED_MESSAGE if code == _INTERRUPT_CODE else "", code)  # typer makes a return value of Ctrl-C
    except InputError as error:
        _exit(f"qkv: {one_line(error)}", 2)
    except (typer.Abort, KeyboardInterrupt):
        _exit(_STOPPED_MESSAGE, _INTERRUPT_CODE)
    except BrokenPipeError:  # whoever read the output has gone
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        _exit(_usage_message(error), 2)


def _usage_message(error: Any) -> str:
    """The line about an option or a command that does not exist, or was renamed; nothing: the help was shown."""
    message = error.format_message()
    context, option = getattr(error, "ctx", None), getattr(error, "option_name", None)
    if option is not None and context is not None:
        new_option = renamed_option(option, context.command.name)
        if any(new_option in parameter.opts for parameter in context.command.params):
            return f"qkv: {option} is now {new_option}"
    no_command = re.fullmatch(r"No such command '(.+)'\.", message)
    new_command = renamed_command(no_command[1]) if no_command and context and context.parent is None else None
    if no_command and new_command:
        return f"qkv: the command {no_command[1]} is now {new_command}"
    return f"qkv: {message} (see qkv --help)" if message else ""


def _exit(message: str, code: int) -> None:
    if message:
        print(message, file=sys.stderr)
    sys.exit(code)
