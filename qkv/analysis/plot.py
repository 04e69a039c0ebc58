"""Alignment plots: "'Alignments' example: Bahdanau et al." (Sequence to Sequence models: Attention Models).

Input tokens are columns, output tokens are rows, "color shows value (white is larger)". Figures are drawn without
pyplot and without a window; matplotlib is imported when the first one is drawn.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from qkv.errors import (
    InputError,
    check_names,
    check_number,
    check_path,
    check_type,
    describe_value,
    did_you_mean,
    quote,
)
from qkv.files import atomic_write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

    from qkv.analysis.alignments import Alignment
    from qkv.analysis.notebook_figure import NotebookFigure

__all__ = ["plot_alignment", "plot_alignments"]

HeadSelection = Literal["mean", "each"] | Sequence[int]
AlignmentItem = tuple[Tensor, Sequence[str], Sequence[str], str | None]  # weights, source, target, title

_SUFFIXES = (".png", ".svg", ".pdf")
INK, _GREY = "#1c2330", "#6b7484"
_COLORS = ("#11151f", "#2b3a5e", "#5f7db3", "#b3c6e4", "#ffffff")  # from dark to white in even steps of lightness
_POINT = 1 / 72  # inches
DPI = 200
_MIN_CELL, _MAX_CELL = 0.12, 0.38  # side of a cell in inches


@dataclass
class _Panel:
    """One matrix with its labels; a panel without labels shares those of its neighbor."""

    weights: Tensor  # [N, M]
    source: list[str]
    target: list[str]
    caption: str | None


@dataclass(frozen=True)
class _Dimensions:
    """Sizes in inches; cell and font depend on the number of tokens, so that 40 tokens are as legible as 3."""

    cell: float
    font: float  # points
    pad: float = 0.05  # distance between a label and its cells
    gap: float = 0.28  # distance between panels
    margin: float = 0.12
    bar: float = 0.08

    @property
    def caption(self) -> float:
        """Height of a caption."""
        return (self.font + 7) * _POINT


def plot_alignment(
    weights: Tensor,
    source: Sequence[str],
    target: Sequence[str],
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
    heads: HeadSelection = "mean",
) -> Figure:
    """Draw the attention weights of one pair of sequences and return the figure, which a notebook shows.

    Args:
        weights: attention weights [H, N, M] or [N, M].
        source: the M input tokens, which label the columns.
        target: the N output tokens, which label the rows.
        path: a .png, .svg or .pdf file to write; None: no file.
        title: a line above the plot.
        heads: "mean" of all heads in one panel, "each" in its own panel, or the numbers of the heads to draw, from 0.
    """
    file = None if path is None else check_output_path(path)
    _check_title(title)
    maps = _check_weights(weights, source, target, location="alignment")  # [H, N, M]
    source_labels, target_labels = _visible_tokens(source), _visible_tokens(target)
    if isinstance(heads, str) and heads == "mean":
        panels = [_Panel(maps.mean(0), source_labels, target_labels, None)]
    else:
        head_ids = range(len(maps)) if isinstance(heads, str) and heads == "each" else _check_heads(heads, len(maps))
        columns = _num_columns(len(head_ids), 4)
        # panels share their labels: columns are labeled in the first row, rows in the first column
        panels = [
            _Panel(maps[h], source_labels if i < columns else [], [] if i % columns else target_labels, f"head {h}")
            for i, h in enumerate(head_ids)
        ]
    return finish_figure(_draw_panels(panels, _num_columns(len(panels), 4), title), file)


def plot_alignments(
    items: Sequence[Alignment | AlignmentItem],
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
    columns: int = 6,
) -> Figure:
    """Draw several pairs of sequences in one figure, heads averaged, with one color scale, and return the figure.

        figure = qkv.plot_alignments(qkv.alignments(bundle, ["attention", "network"]))  # a notebook shows it
        qkv.plot_alignments(qkv.alignments(bundle, ["attention"]), "attention.png")

    Args:
        items: the result of `qkv.alignments`, or (weights, source tokens, target tokens, title) per panel.
        path: a .png, .svg or .pdf file to write; None: no file.
        title: a line above the plot.
        columns: maximum number of panels per row.
    """
    file = None if path is None else check_output_path(path)
    _check_title(title)
    check_number(columns, "columns", 1)
    expected = "the result of qkv.alignments"
    check_type(items, (list, tuple), "items", expected)
    if not items:
        raise InputError("alignments: nothing to draw; give at least one item")
    panels = []
    for i, item in enumerate(items):
        if isinstance(item, tuple) and len(item) == 4:
            weights, source, target, caption = item
        elif hasattr(item, "weights") and hasattr(item, "source_tokens"):
            weights, source, target, caption = item.weights, item.source_tokens, item.target_tokens, None
        else:
            raise InputError(f"items: item {i + 1} is {describe_value(item)}; expected {expected}")
        mean = _check_weights(weights, source, target, location=f"alignments: item {i + 1}").mean(0)
        panels.append(_Panel(mean, _visible_tokens(source), _visible_tokens(target), caption))
    return finish_figure(_draw_panels(panels, _num_columns(len(panels), columns), title), file)


def _num_columns(num_panels: int, max_columns: int) -> int:
    """Return the number of columns of a grid with rows of nearly equal length."""
    rows = -(-num_panels // max(1, max_columns))
    return -(-num_panels // rows)


def _check_title(title: object) -> None:
    if title is not None:
        check_type(title, str, "title", "a line of text")


def _check_weights(weights: Tensor, source: Sequence[str], target: Sequence[str], location: str) -> Tensor:  # [H, N, M]
    if not isinstance(weights, Tensor | np.ndarray) or isinstance(source, str) or isinstance(target, str):
        raise InputError(f"{location}: expected weights [H, N, M] and two lists of tokens; see qkv.alignments")
    source_names, target_names = (check_names(tokens, f"{location}: tokens") for tokens in (source, target))
    maps = torch.as_tensor(weights).detach().to("cpu", torch.float32)
    maps = maps[None] if maps.dim() == 2 else maps
    if maps.dim() != 3 or not len(maps):
        raise InputError(f"{location}: weights have shape {list(weights.shape)}; expected [H, N, M] or [N, M]")
    n, m = maps.shape[1:]
    num_labels = len(target_names), len(source_names)
    if (n, m) != num_labels or not n * m:
        labels = "labels for {} and {}".format(*num_labels)
        raise InputError(f"{location}: weights are for {n} output and {m} input tokens, {labels}")
    if not bool(torch.isfinite(maps).all()):
        raise InputError(f"{location}: weights are not all finite numbers; was the model trained to the end?")
    return maps


def _visible_tokens(tokens: Sequence[str]) -> list[str]:
    """Return labels on one line, with a visible sign for white space."""
    return [" ".join(token.split()) or "␣" for token in tokens]


def _check_heads(heads: Sequence[int] | str, num_heads: int) -> list[int]:
    if isinstance(heads, str):
        hint = did_you_mean(heads[:60], ("mean", "each"))
        raise InputError(f"heads: {quote(heads)} selects no heads; {hint}, or give a list of numbers")
    check_type(heads, (list, tuple, range), "heads", '"mean", "each" or a list of numbers')
    if not heads:
        raise InputError(f"heads: none given; there are 0 to {num_heads - 1}")
    return [check_number(head, "heads", 0, num_heads - 1) for head in heads]


# ---- drawing --------------------------------------------------------------------------------------------------------


def _draw_panels(panels: list[_Panel], columns: int, title: str | None) -> NotebookFigure:
    """Lay out all panels in inches, from the widths of their labels, so that nothing overlaps."""
    from qkv.analysis.notebook_figure import NotebookFigure  # imports matplotlib

    max_weight = max(float(panel.weights.max()) for panel in panels) or 1.0
    rows = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    dims = _choose_dimensions(rows)
    label_widths = [max(_label_width(row[c], dims) for row in rows if c < len(row)) for c in range(columns)]
    panel_widths = [max(_panel_width(row[c], dims) for row in rows if c < len(row)) for c in range(columns)]
    label_heights = [max(_label_height(panel, dims) for panel in row) for row in rows]
    panel_heights = [max(panel.weights.shape[0] for panel in row) * dims.cell for row in rows]
    title_height = 0.0 if title is None else (dims.font + 14) * _POINT
    color_bar_width = 0.18 + dims.bar + 0.34  # color bar with the space before it and its numbers
    width = 2 * dims.margin + sum(label_widths) + sum(panel_widths) + (columns - 1) * dims.gap + color_bar_width
    height = 2 * dims.margin + title_height + sum(label_heights) + sum(panel_heights) + (len(rows) - 1) * dims.gap
    if title is not None:
        width = max(width, 2 * dims.margin + _text_width(title, dims.font + 2, bold=True))
    fig = NotebookFigure(figsize=(width, height), dpi=DPI, facecolor="white")
    page = _Page(fig, width, height)
    if title is not None:
        page.text(dims.margin, dims.margin, title, size=dims.font + 2, weight="bold", color=INK, va="top")
    y = dims.margin + title_height
    for r, row in enumerate(rows):
        x = dims.margin
        for c, panel in enumerate(row):
            _draw_cells(page, panel, x + label_widths[c], y + label_heights[r], dims, max_weight)
            _draw_labels(page, panel, x + label_widths[c], y + label_heights[r], dims)
            if panel.caption is not None:
                page.text(x + label_widths[c], y, panel.caption, size=dims.font, color=_GREY, va="top")
            x += label_widths[c] + panel_widths[c] + dims.gap
        y += label_heights[r] + panel_heights[r] + dims.gap
    color_bar_x = width - dims.margin - color_bar_width + 0.18
    _draw_color_bar(
        page, color_bar_x, dims.margin + title_height + label_heights[0], min(panel_heights[0], 2.2), dims, max_weight
    )
    return fig


def _choose_dimensions(rows: list[list[_Panel]]) -> _Dimensions:
    """Choose the largest cells that fit a page of about 8 inches for one panel, or 14 for several."""
    max_tokens = max(max(panel.weights.shape) for row in rows for panel in row)
    max_row_tokens = max(sum(panel.weights.shape[1] for panel in row) for row in rows)
    cell = min(_MAX_CELL, max(_MIN_CELL, min(8 / max_tokens, 14 / max_row_tokens)))
    return _Dimensions(cell, font=min(10.0, max(5.0, cell * 44)))


@dataclass
class _Page:
    """Figure with coordinates in inches from its top left corner."""

    fig: Figure
    width: float
    height: float

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        box = (x / self.width, 1 - (y + height) / self.height, width / self.width, height / self.height)
        return self.fig.add_axes(box)

    def text(self, x: float, y: float, text: str, **style: Any) -> None:
        # dollar signs in tokens are no formulas
        self.fig.text(x / self.width, 1 - y / self.height, text, family=font_families(), parse_math=False, **style)


def _draw_cells(page: _Page, panel: _Panel, x: float, y: float, dims: _Dimensions, max_weight: float) -> None:
    n, m = panel.weights.shape
    axes = page.axes(x, y, m * dims.cell, n * dims.cell)
    axes.imshow(
        panel.weights.numpy(), cmap=_colormap(), vmin=0.0, vmax=max_weight, aspect="auto", interpolation="nearest"
    )
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xticks([i - 0.5 for i in range(1, m)], minor=True)
    axes.set_yticks([i - 0.5 for i in range(1, n)], minor=True)
    # lines in the darkest color separate bright cells and are invisible between dark ones
    axes.grid(which="minor", color=_COLORS[0], linewidth=dims.cell * 2)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set(linewidth=0.8, color=_COLORS[0])  # separates a white cell at the edge from the page


def _draw_labels(page: _Page, panel: _Panel, x: float, y: float, dims: _Dimensions) -> None:
    rotation = 0 if _labels_fit(panel, dims) else 90
    for i, token in enumerate(panel.source):
        style: dict[str, Any] = {"ha": "center", "va": "baseline" if rotation == 0 else "bottom", "rotation": rotation}
        page.text(x + (i + 0.5) * dims.cell, y - dims.pad, token, size=dims.font, color=INK, **style)
    for i, token in enumerate(panel.target):
        style = {"ha": "right", "va": "center_baseline"}
        page.text(x - dims.pad, y + (i + 0.5) * dims.cell, token, size=dims.font, color=INK, **style)


def _draw_color_bar(page: _Page, x: float, y: float, height: float, dims: _Dimensions, max_weight: float) -> None:
    axes = page.axes(x, y, dims.bar, height)
    shades = torch.linspace(1, 0, 256)[:, None].numpy()
    axes.imshow(shades, cmap=_colormap(), vmin=0, vmax=1, aspect="auto", extent=(0, 1, 0, 1))
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set(linewidth=0.5, color=_GREY)
    style: dict[str, Any] = {"size": 7, "color": _GREY, "ha": "left"}
    page.text(x + dims.bar + 0.05, y, f"{max_weight:.2g}", va="top", **style)
    page.text(x + dims.bar + 0.05, y + height, "0", va="bottom", **style)


# ---- measuring ------------------------------------------------------------------------------------------------------


def _label_width(panel: _Panel, dims: _Dimensions) -> float:
    """Return the width of the row labels."""
    return max((_text_width(token, dims.font) + dims.pad for token in panel.target), default=0.0)


def _label_height(panel: _Panel, dims: _Dimensions) -> float:
    """Return the height of the caption and the column labels."""
    height = 0.0
    if panel.source:
        line = dims.font * 1.1 * _POINT
        height = dims.pad + (
            line if _labels_fit(panel, dims) else max(_text_width(token, dims.font) for token in panel.source)
        )
    return height + (dims.caption if panel.caption is not None else 0.0)


def _panel_width(panel: _Panel, dims: _Dimensions) -> float:
    caption_width = 0.0 if panel.caption is None else _text_width(panel.caption, dims.font)
    return max(panel.weights.shape[1] * dims.cell, caption_width)


def _labels_fit(panel: _Panel, dims: _Dimensions) -> bool:
    """Return whether every column label fits above its cell; otherwise all are rotated."""
    return all(_text_width(token, dims.font) < 0.94 * dims.cell for token in panel.source)


def _text_width(text: str, size: float, bold: bool = False) -> float:
    """Return the width of a line of text in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=font_families(), size=size, weight="bold" if bold else "normal")
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width) * _POINT


@cache
def font_families() -> list[str]:
    """Return matplotlib's own font, then installed fonts for scripts that it lacks."""
    from matplotlib.font_manager import get_font_names

    fallback_fonts = (
        "Noto Sans CJK SC",
        "Noto Sans CJK JP",
        "PingFang SC",
        "Hiragino Sans",
        "Microsoft YaHei",
        "Noto Sans",
    )
    return ["DejaVu Sans", *sorted(set(fallback_fonts) & set(get_font_names()))]


@cache
def _colormap() -> Colormap:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("alignment", _COLORS)


# ---- writing --------------------------------------------------------------------------------------------------------


def check_output_path(path: str | os.PathLike[str]) -> Path:
    """Return the output path; refuse one that cannot be written before any work is done."""
    file = check_path(path, "path", "the name of a .png, .svg or .pdf file")
    if file.suffix.lower() not in _SUFFIXES:
        raise InputError(f"{file}: a plot is saved as {', '.join(_SUFFIXES)}, not as '{file.suffix}'")
    if not file.parent.is_dir():
        raise InputError(f"{file}: there is no folder '{file.parent}'; create it first")
    return file


def finish_figure(fig: NotebookFigure, file: Path | None) -> Figure:
    """Write the figure atomically if a file is named, and return it."""
    if file is not None:
        atomic_write_bytes(file, fig.to_bytes(file.suffix.lower()[1:]))
    return fig
