"""The command line. A mistake of the user's is one line and exit code 2."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from qkv.cli import checkpoints, data, evaluation, prompt, runs, score, tokenizer, use
from qkv.errors import InputError, in_one_line

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Attention models: train them, use them, score them, watch them attend.",
)
for name, command in {
    "train": runs.train,
    "predict": use.predict,
    "embed": use.embed,
    "eval": evaluation.evaluate_command,
    "score": score.score,
    "prompt": prompt.prompt,
    "look": runs.look,
    "cost": runs.cost,
    "families": checkpoints.list_families,
    "import": checkpoints.import_checkpoint,
    "export": checkpoints.export_checkpoint,
}.items():
    app.command(name)(command)
app.add_typer(tokenizer.app, name="tokenizer")
app.add_typer(data.app, name="data")


@app.callback(invoke_without_command=True)
def about(
    version: Annotated[bool, typer.Option("--version", help="The version, and torch's.", is_eager=True)] = False,
) -> None:
    if version:
        import torch

        from qkv import __version__

        print(f"qkv {__version__}, torch {torch.__version__}")
        raise typer.Exit


_INTERRUPTED = 130  # what shells give for Ctrl-C
_STOPPED = "qkv: stopped; a training run goes on from its last checkpoint when the same command is given again"


def main() -> None:
    """The entry point: says a user's mistake in one line."""
    try:
        code = app(standalone_mode=False) or 0
        _end(_STOPPED if code == _INTERRUPTED else "", code)  # typer makes a return value of Ctrl-C
    except InputError as error:
        _end(f"qkv: {in_one_line(error)}", 2)
    except (typer.Abort, KeyboardInterrupt):
        _end(_STOPPED, _INTERRUPTED)
    except BrokenPipeError:  # whoever read the output has gone
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        said = error.format_message()  # an option or command that does not exist; nothing: the help was shown
        _end(f"qkv: {said} (see qkv --help)" if said else "", 2)


def _end(message: str, code: int) -> None:
    if message:
        print(message, file=sys.stderr)
    sys.exit(code)
