"""Generate the reference part of docs/recipes.md from the sentences under the schema's fields.

python -m qkv.recipe.reference          rewrite docs/recipes.md
python -m qkv.recipe.reference --check  exit with 1 if the file is not up to date
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qkv import families
from qkv.recipe.objectives import OBJECTIVE_CONFIGS
from qkv.recipe.schema import FinetuneRecipe, PretrainingRecipe, Seq2SeqRecipe, TrainConfig

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
BEGIN, END = "<!-- begin of the generated reference -->", "<!-- end of the generated reference -->"
_TITLES = {Seq2SeqRecipe: "Pairs (seq2seq)", PretrainingRecipe: "Pretraining", FinetuneRecipe: "Fine-tuning on a task"}


def field_docs(config_class: type) -> dict[str, str]:
    """Return the attribute docstring of each field of a dataclass, inherited fields included."""
    docs: dict[str, str] = {}
    for base in reversed(config_class.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = typing.cast("ast.ClassDef", ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]).body
        for statement, following in itertools.pairwise(body):
            if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


def render() -> str:
    """Return the reference as Markdown: one table per section."""
    lines = ["## Keys of every recipe", "", *_table(Seq2SeqRecipe, "", only=("name", "seed", "imports")), ""]
    lines += ["### `train`", "", _summary(TrainConfig), "", *_table(TrainConfig, "train."), ""]
    for recipe, title in _TITLES.items():
        lines += [f"## {title}", "", _summary(recipe), ""]
        hints = typing.get_type_hints(recipe)
        names = [
            f.name for f in dataclasses.fields(recipe) if f.name not in ("name", "seed", "imports", "model", "train")
        ]
        for name in names:
            if name == "objective":
                lines += _objectives()
            elif name == "task":
                lines += [
                    "### `task`",
                    "",
                    f"{field_docs(recipe)[name]} The settings are listed in [tasks.md](tasks.md).",
                    "",
                ]
            else:
                lines += _section(name, _dataclass_in(hints[name]), f"{name}.")
    return "\n".join([*lines, *_families()]) + "\n"


def _section(title: str, config_class: type, prefix: str) -> list[str]:
    lines = [f"### `{title}`", "", _summary(config_class), "", *_table(config_class, prefix), ""]
    hints = typing.get_type_hints(config_class)
    for f in dataclasses.fields(config_class):
        nested = _dataclass_in(hints[f.name])
        if nested is not None and not issubclass(config_class, nested):
            lines += _section(f"{prefix}{f.name}", nested, f"{prefix}{f.name}.")
    return lines


def _objectives() -> list[str]:
    lines = [
        "### `objective`",
        "",
        "Objectives by name, each with its settings; a bare name takes the paper's settings.",
        "",
    ]
    for name in ("clm", "mlm", "plm", "denoising", "span_corruption"):
        config_class = OBJECTIVE_CONFIGS.get(name)
        lines += [f"**`{name}`** {_summary(config_class)}", "", *_table(config_class, f"objective.{name}."), ""]
    return lines


def _families() -> Iterator[str]:
    yield from (
        "## `model`",
        "",
        "`family` and `size`, and any field of the family's Config; `qkv families` lists the sizes.",
        "`embeddings` names a file of word vectors, which the token embeddings start from (docs/vectors.md).",
    )
    yield from ("Or `init_from`, a pretrained model, with `dropout` and `attention_dropout` if they are to change.", "")
    yield from ("| family | sizes | fields |", "|---|---|---|")
    for name in families.names():
        family = families.get_family(name)
        fields = " ".join(f.name for f in dataclasses.fields(family.Config))
        yield f"| `{name}` | {', '.join(family.PRESETS)} | `{fields}` |"


def _table(config_class: type, prefix: str, only: tuple[str, ...] | None = None) -> list[str]:
    docs, rows = field_docs(config_class), ["| key | default | meaning |", "|---|---|---|"]
    fields = [f for f in dataclasses.fields(config_class) if only is None or f.name in only]
    return [*rows, *(f"| `{prefix}{f.name}` | {_default(f)} | {docs.get(f.name, '')} |" for f in fields)]


def _default(f: dataclasses.Field[Any]) -> str:
    value = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
    if value is dataclasses.MISSING:
        return "required"
    if value is None or value in ([], {}, "") or dataclasses.is_dataclass(value):
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _dataclass_in(hint: Any) -> Any:
    """Return the dataclass that a type hint is, or contains."""
    options = [hint, *typing.get_args(hint)]
    return next((option for option in options if isinstance(option, type) and dataclasses.is_dataclass(option)), None)


def _summary(config_class: type) -> str:
    return " ".join((inspect.getdoc(config_class) or "").split("\n\n")[0].split())


def updated(page: str) -> str:
    """Return the page with the generated part replaced."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{render()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        sys.exit(
            0 if updated(text) == text else "docs/recipes.md is not up to date: run python -m qkv.recipe.reference"
        )
    PAGE.write_text(updated(text), encoding="utf-8")
