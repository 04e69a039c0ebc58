"""The command that draws a model's attention: plot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from qkv.cli.options import Device, RunFolder, load_model
from qkv.errors import InputError


def plot(
    run: RunFolder,
    texts: Annotated[list[str], typer.Argument(metavar="TEXT...", help="Inputs, a panel each.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture: .png, .svg or .pdf.")] = Path("map.png"),
    target: Annotated[list[str] | None, typer.Option(help="Outputs to align with, instead of the model's own.")] = None,
    layer: Annotated[
        str | None, typer.Option(help="Which attention, such as decoder.1.cross_attention; by default the last.")
    ] = None,
    heads: Annotated[str, typer.Option(help="mean, each, or numbers such as 0,2.")] = "mean",
    device: Device = None,
) -> None:
    """The alignment plot: input across, output down, a panel a head or their mean."""
    from qkv.analysis.alignments import alignments
    from qkv.analysis.plot import plot_alignment, plot_alignments

    if target is not None and len(target) != len(texts):
        raise InputError(f"{len(texts)} texts and {len(target)} targets; give one --target for each text")
    selected_heads = _parse_heads(heads)
    maps = alignments(load_model(run, device), texts, target, layer)
    if len(maps) == 1:
        alignment = maps[0]
        plot_alignment(
            alignment.weights,
            alignment.source_tokens,
            alignment.target_tokens,
            output,
            title=texts[0],
            heads=selected_heads,
        )
    else:
        if selected_heads != "mean":
            raise InputError("--heads shows the heads of one text; give one TEXT, or leave it at mean")
        items = [
            (a.weights.mean(0), a.source_tokens, a.target_tokens, text) for a, text in zip(maps, texts, strict=True)
        ]
        plot_alignments(items, output)
    print(f"{output}: attention of {maps[0].layer}")


def _parse_heads(text: str) -> Literal["mean", "each"] | list[int]:
    if text in ("mean", "each"):
        return text  # type: ignore[return-value]
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise InputError(f"--heads is mean, each, or numbers such as 0,2, not '{text}'") from None
