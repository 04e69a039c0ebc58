"""Run a command. An error that the user can correct, full output and Ctrl-C are one line each, for all commands."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from qkv.cli import INTERRUPT_CODE
from qkv.errors import InputError, one_line

_WRITE_ERRORS = (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT)
_PACKAGE = str(Path(__file__).parents[1])


def run() -> None:
    """Run the command of `sys.argv` and end the program; print an error of the user as one line."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning(warnings.showwarning)
            code = _run_command()
        _flush_stdout()  # a full disk or a closed pipe is found here, not when the interpreter shuts down
        if code == INTERRUPT_CODE:  # typer returns it for Ctrl-C
            raise KeyboardInterrupt
        _exit("", code)
    except InputError as error:
        _exit(f"qkv: {one_line(error)}", 2)
    except BrokenPipeError:
        _exit("", 1)
    except OSError as error:
        _exit(f"qkv: {_describe_os_error(error)}", 2)


def _run_command() -> int:
    """Run the command of `sys.argv`; return its exit code."""
    import typer

    from qkv.cli import commands

    try:
        return int(commands.app(prog_name="qkv", standalone_mode=False) or 0)
    except typer.Abort:
        return INTERRUPT_CODE
    except Exception as error:
        if not hasattr(error, "format_message"):  # the errors of usage, whose class depends on the version of typer
            raise
        message = commands.usage_message(error)
        if message:  # else the help has been printed instead
            print(message, file=sys.stderr)
        return 2


def _describe_os_error(error: OSError) -> str:
    """Return one line for an error of the operating system; an error in writing to an open file names no file."""
    reason = error.strerror or str(error)
    if error.filename is None and error.errno in _WRITE_ERRORS:
        return f"the output cannot be written: {reason}; free some space, or write it elsewhere"
    return reason if error.filename is None else f"{error.filename}: {reason}"


def _flush_stdout() -> None:
    if sys.stdout is not None:  # None: started with a closed stdout
        sys.stdout.flush()


def _show_warning(show_by_default: Any) -> Any:
    """Return a replacement for `warnings.showwarning` that prints the warnings of qkv as one line."""

    def show(message: Any, category: Any, filename: str, *location: Any, **options: Any) -> None:
        if filename.startswith(_PACKAGE):
            print(f"qkv: warning: {' '.join(str(message).splitlines())}", file=sys.stderr)
        else:
            show_by_default(message, category, filename, *location, **options)

    return show


def _exit(message: str, code: int) -> None:
    """End with a message; output that could not be written is dropped, so that the interpreter does not try again."""
    if message:
        with suppress(OSError):
            print(message, file=sys.stderr)
    try:
        _flush_stdout()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
