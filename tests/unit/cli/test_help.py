"""Help of all commands: one sentence per option, examples that parse, 80 columns, and no torch at start-up."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from qkv.cli.commands import app
from qkv.cli.help import parse_docstring
from qkv.recipe.packaged import recipe_names

ROOT = typer.main.get_command(app)


def _iter_commands(command: Any = ROOT, path: str = "qkv") -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, subcommand in getattr(command, "commands", {}).items():
        yield from _iter_commands(subcommand, f"{path} {name}")


COMMANDS = dict(_iter_commands())
PARAMETERS = [
    pytest.param(parameter, id=f"{path} {parameter.opts[0]}")
    for path, command in COMMANDS.items()
    for parameter in command.params
]


def _examples(command: Any) -> list[str]:
    return [line.removeprefix("$ ") for line in (command.epilog or "").splitlines() if line.startswith("$ qkv ")]


def test_all_commands_are_found():
    assert {"qkv train", "qkv predict", "qkv eval", "qkv tokenizer show", "qkv data build"} <= set(COMMANDS)


@pytest.mark.parametrize("parameter", PARAMETERS)
def test_every_option_has_one_sentence_of_help(parameter):
    text = parameter.help or ""
    assert re.fullmatch(r"[A-Z].*[^.…]\.", text), text
    assert not re.search(r"\. [A-Z]|; ", re.sub(r"\(.*?\)", "", text)), f"more than one sentence: {text}"


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_has_a_description_and_examples(path):
    command = COMMANDS[path]
    summary = command.help.split("\n\n")[0]
    assert re.fullmatch(r"[A-Z].*[^.…]\.", summary), summary
    assert _examples(command)


@pytest.mark.parametrize("path", COMMANDS)
def test_help_fits_into_80_columns_with_each_example_on_one_line(path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    with pytest.raises(SystemExit):
        ROOT([*path.split()[1:], "--help"], prog_name="qkv")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    printed = {line.strip() for line in lines}
    assert all(f"$ {example}".replace("\\[", "[") in printed for example in _examples(COMMANDS[path]))
    assert not any("…" in line for line in lines), "a column was cut off"


@pytest.mark.parametrize("example", [example for command in COMMANDS.values() for example in _examples(command)])
def test_every_example_parses(example):
    words = shlex.split(example.replace("\\[", "["))[1:]
    if words == ["COMMAND", "--help"]:
        return
    _parse(words)


def _parse(words):
    name, command = "qkv", ROOT
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name, *words = words
        command = command.commands[name]
    assert not command.make_context(name, words, resilient_parsing=hasattr(command, "commands")).args


def test_options_are_grouped_in_panels():
    assert {command.rich_help_panel for command in ROOT.commands.values()} == {
        "Train and prepare data",
        "Use a model",
        "Evaluate and inspect",
        "Checkpoints and tokenizers",
    }
    for path in ("qkv train", "qkv predict", "qkv eval", "qkv score"):
        assert len({parameter.rich_help_panel for parameter in COMMANDS[path].params} - {None}) >= 3, path


def test_a_docstring_is_split_into_paragraphs_and_examples():
    description, epilog = parse_docstring(
        """Do it.

        A long
        line.

        Examples:
            qkv a [x]
            qkv b
        """
    )
    assert description == "Do it.\n\nA long line."
    assert epilog == "Examples:\n\n$ qkv a \\[x]\n$ qkv b"
    assert parse_docstring("Do it.\n\nExample: qkv a") == ("Do it.", "Example:\n\n$ qkv a")
    assert parse_docstring("Do it.") == ("Do it.", None)


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["predict", "--help"], ["--no-such-option"]])
def test_help_imports_no_torch(words):
    program = (
        "import sys; from qkv.cli import main\n"
        "try: main()\n"
        "finally: print('TORCH' if 'torch' in sys.modules else 'LIGHT', file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 2), done.stderr
    assert done.stderr.strip().endswith("LIGHT"), done.stderr


@pytest.mark.parametrize("words", [["families", "--json"], ["train", "--help"]])
def test_a_closed_pipe_ends_quietly(words):
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "qkv.cli", *words]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")


def _readme_commands() -> list[str]:
    text = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    lines = [line.split("  #")[0].strip() for line in text.splitlines() if line.startswith("    qkv ")]
    return [command for line in lines for command in line.split(" && ")]


@pytest.mark.parametrize("command", _readme_commands())
def test_every_command_of_the_readme_parses(command):
    _parse(shlex.split(command)[1:])


def test_every_packaged_recipe_of_the_readme_exists():
    names = re.findall(r"qkv (?:train|cost|recipes copy) ([a-z][a-z0-9-]+)", "\n".join(_readme_commands()))
    assert names
    assert set(names) <= set(recipe_names())
