"""`qkv plot`: attention weights of a model as an alignment plot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from qkv.cli.help import OUTPUT
from qkv.cli.options import Device, RunFolder, load_model
from qkv.errors import InputError

_ATTENTION = "Attention"
Targets = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="Align with this output, once per input text, instead of the output of the model (repeatable).",
        rich_help_panel=_ATTENTION,
    ),
]
LayerName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Plot this attention layer, such as decoder.1.cross_attention.",
        show_default="the last one",
        rich_help_panel=_ATTENTION,
    ),
]
Heads = Annotated[
    str,
    typer.Option(
        metavar="HEADS",
        help="Plot the mean of all heads, each head, or the heads with these numbers, such as 0,2.",
        rich_help_panel=_ATTENTION,
    ),
]
PlotFile = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the plot to this .png, .svg or .pdf file.",
        rich_help_panel=OUTPUT,
    ),
]


def plot(
    run: RunFolder,
    texts: Annotated[list[str], typer.Argument(metavar="TEXT", help="Input texts, with one panel each.")],
    target: Targets = None,
    layer: LayerName = None,
    heads: Heads = "mean",
    output: PlotFile = Path("map.png"),
    device: Device = None,
) -> None:
    """Plot attention weights as an alignment of input and output tokens.

    The columns are input tokens and the rows output tokens, with one panel per head or one for their mean.

    Examples:
        qkv plot runs/g2p-demo attention
        qkv plot runs/g2p-demo attention --heads each --output attention.svg
    """
    from qkv.analysis.alignments import alignments
    from qkv.analysis.plot import plot_alignment, plot_alignments

    if target is not None and len(target) != len(texts):
        raise InputError(f"{len(texts)} texts and {len(target)} targets; give one --target per TEXT")
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
            raise InputError("--heads other than mean needs a single TEXT; give one TEXT, or leave --heads out")
        panels = [
            (alignment.weights.mean(0), alignment.source_tokens, alignment.target_tokens, text)
            for alignment, text in zip(maps, texts, strict=True)
        ]
        plot_alignments(panels, output)
    print(f"{output}: attention of {maps[0].layer}")


def _parse_heads(text: str) -> Literal["mean", "each"] | list[int]:
    if text == "mean":
        return "mean"
    if text == "each":
        return "each"
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise InputError(f"--heads must be mean, each, or numbers such as 0,2, not '{text}'") from None
