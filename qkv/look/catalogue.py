"""The table of families: sizes with their parameters, heads, papers."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from qkv import families
from qkv.nn.model import hollow
from qkv.weights.huggingface import head_names

_WIDE = 120  # columns where nobody's window says how many there are


def catalogue() -> list[dict[str, Any]]:
    """A row a family: name, Hugging Face's name, paper, parameters by size, heads."""
    return [_row(name) for name in families.names()]


def _row(name: str) -> dict[str, Any]:
    module = families.family(name)
    form = getattr(module, "HUGGING_FACE", None)
    heads = [] if form is None else head_names(module)
    return {
        "family": name,
        "model_type": None if form is None else form.model_type,
        "paper": module.PAPER,
        "sizes": {size: parameters(module, shape) for size, shape in module.SIZES.items()},
        "heads": [head for head in heads if head not in ("body", "pooler")] or ["generation"],
    }


def parameters(module: Any, shape: Any) -> int:
    """Counted on a model that takes no memory, with the family's own vocabulary and head."""
    return sum(parameter.numel() for parameter in hollow(module.spec(shape)).parameters())


def render(rows: list[dict[str, Any]]) -> str:
    """The same for a terminal."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("family", "sizes, in million parameters", "heads", "paper"):
        table.add_column(column, overflow="fold")
    for row in rows:
        sizes = ", ".join(f"{size} {count / 1e6:,.0f}" for size, count in row["sizes"].items())
        table.add_row(row["family"], sizes, ", ".join(row["heads"]), row["paper"])
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    with console.capture() as seen:
        console.print(table)
    return seen.get().rstrip()
