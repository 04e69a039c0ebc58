"""Help texts of commands: the docstring becomes the description, its section "Example" the end of the help."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

# Panels that several commands share; an option without a panel is shown last.
INPUT, OUTPUT, GENERATION = "Input", "Output", "Generation"
_OTHER_OPTIONS = "Other options"


class _HelpLayout:
    """Mixin of commands that leaves out the type of flags and puts options without a panel after the others."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of the other base class
        options = [param for param in params if param.param_type_name == "option"]
        has_panels = any(getattr(option, "rich_help_panel", None) for option in options)
        for option in options:
            if getattr(option, "is_flag", False) and option.metavar is None:
                option.metavar = ""
            if has_panels and not getattr(option, "rich_help_panel", None):
                option.rich_help_panel = _OTHER_OPTIONS
        return params


class Command(_HelpLayout, TyperCommand):
    """A command of qkv."""


class Group(_HelpLayout, TyperGroup):
    """A command of qkv with subcommands."""


def make_app(docstring: str, *, no_args_is_help: bool = True, add_completion: bool = False) -> typer.Typer:
    """Return an application, or a command with subcommands, whose help is a docstring with examples."""
    description, epilog = parse_docstring(docstring)
    return typer.Typer(
        cls=Group,
        help=description,
        epilog=epilog,
        no_args_is_help=no_args_is_help,
        add_completion=add_completion,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )


def add_command(app: typer.Typer, name: str, function: Callable[..., Any], panel: str | None = None) -> None:
    """Add a function as a command; its docstring is the help."""
    description, epilog = parse_docstring(function.__doc__ or "")
    app.command(name, cls=Command, help=description, epilog=epilog, rich_help_panel=panel)(function)


def parse_docstring(docstring: str) -> tuple[str, str | None]:
    """Split a docstring into a description with one line per paragraph, and an epilog with the examples.

    The examples are the last section: a line "Example:" or "Examples:" and one command per line.
    """
    text = inspect.cleandoc(docstring)
    description, *sections = re.split(r"^Examples?:\s*", text, maxsplit=1, flags=re.MULTILINE)
    paragraphs = [" ".join(paragraph.split()) for paragraph in description.strip().split("\n\n")]
    examples = [line.strip() for line in sections[0].splitlines() if line.strip()] if sections else []
    heading = "Example:" if len(examples) == 1 else "Examples:"
    commands = "\n".join(f"$ {escape(example)}" for example in examples)
    return escape("\n\n".join(paragraphs)), f"{heading}\n\n{commands}" if examples else None
