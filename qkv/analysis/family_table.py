"""Table of the model families: presets with parameter counts, heads, papers."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from qkv import families
from qkv.nn.construction import build_on_meta

_DEFAULT_WIDTH = 120  # columns if the output is no terminal


def family_rows() -> list[dict[str, Any]]:
    """Return one row per family: name, Hugging Face model type, paper, parameters of each preset, heads."""
    return [_family_row(name) for name in families.names()]


def _family_row(name: str) -> dict[str, Any]:
    module = families.get_family(name)
    hf_format = getattr(module, "HF_FORMAT", None)
    heads = families.head_names(module)
    return {
        "family": name,
        "model_type": None if hf_format is None else hf_format.model_type,
        "paper": module.PAPER,
        "presets": {preset: count_parameters(module, config) for preset, config in module.PRESETS.items()},
        "heads": [head for head in heads if head not in ("backbone", "pooler")] or ["seq2seq_lm"],
    }


def count_parameters(module: Any, config: Any) -> int:
    """Return the number of parameters of a configuration with the family's own vocabulary and default head."""
    return sum(parameter.numel() for parameter in build_on_meta(module.make_spec(config)).parameters())


def render_family_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows of `family_rows` as a table for a terminal."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("family", "presets, in million parameters", "heads", "paper"):
        table.add_column(column, overflow="fold")
    for row in rows:
        presets = ", ".join(f"{preset} {count / 1e6:,.0f}" for preset, count in row["presets"].items())
        table.add_row(row["family"], presets, ", ".join(row["heads"]), row["paper"])
    console = Console()
    if not console.is_terminal:
        console = Console(width=_DEFAULT_WIDTH)
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip()
