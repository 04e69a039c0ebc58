"""`qkv list`: everything that recipes and options call by a name, registered extensions included."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from qkv.cli.options import Json
from qkv.errors import InputError, did_you_mean, quote

KINDS = (
    "tasks",
    "metrics",
    "formats",
    "recipes",
    "families",
    "objectives",
    "schedules",
    "score-functions",
    "callbacks",
)


def _complete_kind(incomplete: str) -> list[str]:
    return [kind for kind in KINDS if kind.startswith(incomplete)]


Kind = Annotated[
    str | None,
    typer.Argument(metavar="KIND", help=f"What to list: {', '.join(KINDS)}.", autocompletion=_complete_kind),
]


def list_names(kind: Kind = None, as_json: Json = False) -> None:
    """List the names that recipes and options take, each with one line.

    Extensions are listed too, if --import names their module or their package is installed.

    Examples:
        qkv list tasks
        qkv list metrics --json
    """
    if kind is not None and kind not in KINDS:
        raise InputError(f"qkv list: no kind {quote(kind)}; {did_you_mean(kind[:60], KINDS)}")
    descriptions = {name: _DESCRIBE[name]() for name in (KINDS if kind is None else (kind,))}
    if as_json:
        import json

        print(json.dumps(descriptions if kind is None else descriptions[kind], indent=2, ensure_ascii=False))
        return
    for title, rows in descriptions.items():
        if kind is None:
            print(f"{title}:")
        width = max(map(len, rows), default=0)
        indent = "  " if kind is None else ""
        for name, description in rows.items():
            print(f"{indent}{name:<{width}}  {description}".rstrip())


def _summary(entry: Any) -> str:
    """Return the first sentence of a docstring."""
    paragraph = (inspect.getdoc(entry) or "").split("\n\n")[0]
    return " ".join(paragraph.split()).rstrip(".")


def _describe_registry(registry: Any, descriptions: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a line per entry of a registry: the given one, else the first sentence of its docstring."""
    known = descriptions or {}
    return {name: known.get(name) or _summary(registry.get(name)) for name in registry.names()}


def _tasks() -> dict[str, str]:
    from qkv.recipe.task_names import ALIASES, DESCRIPTIONS, TASKS

    aliases = {name: alias for alias, name in ALIASES.items()}
    rows = _describe_registry(TASKS, DESCRIPTIONS)
    return {name: row + (f" (alias {aliases[name]})" if name in aliases else "") for name, row in rows.items()}


def _metrics() -> dict[str, str]:
    from qkv.metrics.registry import DESCRIPTIONS, METRICS

    rows = {}
    for name in METRICS.names():
        entry = METRICS.get(name)
        details = ["" if entry.higher_is_better else "lower is better", entry.package and f"needs {entry.package}"]
        note = ", ".join(detail for detail in details if detail)
        rows[name] = f"{DESCRIPTIONS.get(name, entry.data_kind)}{f' ({note})' if note else ''}"
    return rows


def _formats() -> dict[str, str]:
    from qkv.data.formats import FORMATS

    return {name: FORMATS.get(name).description for name in FORMATS.names()}


def _recipes() -> dict[str, str]:
    from qkv.recipe.packaged import describe_recipe, recipe_names

    return {name: describe_recipe(name) for name in recipe_names()}


def _families() -> dict[str, str]:
    from qkv import families

    return {name: _summary(families.get_family(name)) for name in families.names()}


def _objectives() -> dict[str, str]:
    from qkv.recipe.objectives import OBJECTIVE_CONFIGS

    return _describe_registry(OBJECTIVE_CONFIGS)


def _schedules() -> dict[str, str]:
    from qkv.recipe.registries import SCHEDULES

    return _describe_registry(SCHEDULES)


def _score_functions() -> dict[str, str]:
    from qkv.score_functions import SCORE_FUNCTIONS

    return _describe_registry(SCORE_FUNCTIONS)


def _callbacks() -> dict[str, str]:
    from qkv.recipe.registries import CALLBACKS

    return _describe_registry(CALLBACKS)


_DESCRIBE: dict[str, Callable[[], dict[str, str]]] = {
    "tasks": _tasks,
    "metrics": _metrics,
    "formats": _formats,
    "recipes": _recipes,
    "families": _families,
    "objectives": _objectives,
    "schedules": _schedules,
    "score-functions": _score_functions,
    "callbacks": _callbacks,
}
