"""The command line. A mistake of the user's is one line and exit code 2."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from qkv.cli import checkpoints, data, eval, predict, prompt, score, tokenizer, train
from qkv.errors import InputError, one_line

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Attention models: train them, use them, score them, watch them attend.",
)
for name, command in {
    "train": train.train,
    "predict": predict.predict,
    "embed": predict.embed,
    "eval": eval.eval_command,
    "score": score.score,
    "prompt": prompt.prompt,
    "look": train.plot,
    "cost": train.cost,
    "families": checkpoints.list_families,
    "import": checkpoints.import_checkpoint,
    "export": checkpoints.export_checkpoint,
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
        message = error.format_message()  # an option or command that does not exist; nothing: the help was shown
        _exit(f"qkv: {message} (see qkv --help)" if message else "", 2)


def _exit(message: str, code: int) -> None:
    if message:
        print(message, file=sys.stderr)
    sys.exit(code)
