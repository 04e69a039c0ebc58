"""The alignment plot: "'Alignments' example: Bahdanau et al." (Sequence to Sequence models: Attention Models).

Input across, output down, "color shows value (white is larger)". Drawn on a canvas of its own: no window, no pyplot;
matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from qkv.errors import InputError, nearest
from qkv.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

__all__ = ["plot_alignment", "plot_alignments"]

Heads = Literal["mean", "each"] | Sequence[int]
Item = tuple[Tensor, Sequence[str], Sequence[str], str | None]  # weights, source, target, title

_SUFFIXES = (".png", ".svg", ".pdf")
_INK, _GREY = "#1c2330", "#6b7484"
_COLOURS = ("#11151f", "#2b3a5e", "#5f7db3", "#b3c6e4", "#ffffff")  # dark to white, lightness rising evenly
_POINT = 1 / 72  # inches
_DOTS = 200  # an inch
_SMALLEST, _LARGEST = 0.12, 0.38  # a cell, in inches


@dataclass
class _Panel:
    """One matrix with its labels; where there are none, a neighbour shows them."""

    weights: Tensor  # [N, M]
    source: list[str]
    target: list[str]
    caption: str | None


@dataclass(frozen=True)
class _Sizes:
    """Inches; cell and font follow the number of tokens, so that a picture of 40 is as clear as one of 3."""

    cell: float
    font: float  # points
    pad: float = 0.05  # between a label and its cells
    gap: float = 0.28  # between panels
    margin: float = 0.12
    bar: float = 0.08

    @property
    def caption(self) -> float:
        """Height that a caption takes."""
        return (self.font + 7) * _POINT


def plot_alignment(
    weights: Tensor,
    source: Sequence[str],
    target: Sequence[str],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    heads: Heads = "mean",
) -> None:
    """Draws one sentence's weights [H, N, M] or [N, M] into a .png, .svg or .pdf file.

    `heads`: their `mean` in one panel, `each` in a panel of its own, or the numbers of those to draw, from 0.
    """
    file = _file(path)
    maps = _weights(weights, source, target, where="alignment")  # [H, N, M]
    across, down = _visible(source), _visible(target)
    if heads == "mean":
        panels = [_Panel(maps.mean(0), across, down, None)]
    else:
        chosen = range(len(maps)) if heads == "each" else _numbers(heads, len(maps))
        columns = _columns(len(chosen), 4)
        # neighbours show the same words: once at the top and once at the left is enough
        panels = [
            _Panel(maps[h], across if i < columns else [], [] if i % columns else down, f"head {h}")
            for i, h in enumerate(chosen)
        ]
    _write(_draw(panels, _columns(len(panels), 4), title), file)


def plot_alignments(
    items: Sequence[Item], path: str | os.PathLike[str], *, title: str | None = None, columns: int = 6
) -> None:
    """Draws several sentences side by side, heads averaged; `items` are (weights, source, target, title).

    More than `columns` of them go on in the next row. One scale of colours holds for all.
    """
    file = _file(path)
    if not items:
        raise InputError("alignments: nothing to draw; give at least one item")
    panels = []
    for i, (weights, source, target, caption) in enumerate(items):
        mean = _weights(weights, source, target, where=f"alignments: item {i + 1}").mean(0)
        panels.append(_Panel(mean, _visible(source), _visible(target), caption))
    _write(_draw(panels, _columns(len(panels), columns), title), file)


def _columns(panels: int, most: int) -> int:
    """Columns of a grid whose rows are as even as they can be."""
    rows = -(-panels // max(1, most))
    return -(-panels // rows)


def _weights(weights: Tensor, source: Sequence[str], target: Sequence[str], where: str) -> Tensor:  # [H, N, M]
    maps = torch.as_tensor(weights).detach().to("cpu", torch.float32)
    maps = maps[None] if maps.dim() == 2 else maps
    if maps.dim() != 3 or not len(maps):
        raise InputError(f"{where}: weights have shape {list(weights.shape)}; [H, N, M] or [N, M] is wanted")
    n, m = maps.shape[1:]
    if (n, m) != (len(target), len(source)) or not n * m:
        raise InputError(
            f"{where}: weights are for {n} output and {m} input tokens, labels for {len(target)} and {len(source)}"
        )
    if not bool(torch.isfinite(maps).all()):
        raise InputError(f"{where}: weights are not all finite numbers; was the model trained to the end?")
    return maps


def _visible(words: Sequence[str]) -> list[str]:
    """A token that is white space would leave its row without a name, a line break would tear it."""
    return [" ".join(word.split()) or "␣" for word in words]


def _numbers(heads: Sequence[int] | str, count: int) -> list[int]:
    if isinstance(heads, str):
        raise InputError(
            f"heads: '{heads}' is none of the ways; {nearest(heads, ('mean', 'each'))}, or a list of numbers"
        )
    wrong = [head for head in heads if not 0 <= head < count]
    if wrong or not heads:
        raise InputError(f"heads: {wrong[0] if wrong else 'none'} given; there are 0 to {count - 1}")
    return list(heads)


# ---- drawing --------------------------------------------------------------------------------------------------------


def _draw(panels: list[_Panel], columns: int, title: str | None) -> Figure:
    """Every place is worked out in inches from the words' own widths: nothing overlaps and nothing is wasted."""
    from matplotlib.figure import Figure

    top = max(float(panel.weights.max()) for panel in panels) or 1.0
    rows = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    sizes = _sizes(rows)
    lefts = [max(_left(row[c], sizes) for row in rows if c < len(row)) for c in range(columns)]
    widths = [max(_width(row[c], sizes) for row in rows if c < len(row)) for c in range(columns)]
    tops = [max(_top(panel, sizes) for panel in row) for row in rows]
    heights = [max(panel.weights.shape[0] for panel in row) * sizes.cell for row in rows]
    heading = 0.0 if title is None else (sizes.font + 14) * _POINT
    scale = 0.18 + sizes.bar + 0.34  # the colour bar, with the room before it and its numbers
    width = 2 * sizes.margin + sum(lefts) + sum(widths) + (columns - 1) * sizes.gap + scale
    height = 2 * sizes.margin + heading + sum(tops) + sum(heights) + (len(rows) - 1) * sizes.gap
    if title is not None:
        width = max(width, 2 * sizes.margin + _extent(title, sizes.font + 2, bold=True))
    figure = Figure(figsize=(width, height), dpi=_DOTS, facecolor="white")
    page = _Page(figure, width, height)
    if title is not None:
        page.text(sizes.margin, sizes.margin, title, size=sizes.font + 2, weight="bold", color=_INK, va="top")
    y = sizes.margin + heading
    for r, row in enumerate(rows):
        x = sizes.margin
        for c, panel in enumerate(row):
            _cells(page, panel, x + lefts[c], y + tops[r], sizes, top)
            _words(page, panel, x + lefts[c], y + tops[r], sizes)
            if panel.caption is not None:
                page.text(x + lefts[c], y, panel.caption, size=sizes.font, color=_GREY, va="top")
            x += lefts[c] + widths[c] + sizes.gap
        y += tops[r] + heights[r] + sizes.gap
    right = width - sizes.margin - scale + 0.18
    _bar(page, right, sizes.margin + heading + tops[0], min(heights[0], 2.2), sizes, top)
    return figure


def _sizes(rows: list[list[_Panel]]) -> _Sizes:
    """Cells as large as a page of about 8 inches for one panel and 14 for several allows."""
    longest = max(max(panel.weights.shape) for row in rows for panel in row)
    across = max(sum(panel.weights.shape[1] for panel in row) for row in rows)
    cell = min(_LARGEST, max(_SMALLEST, min(8 / longest, 14 / across)))
    return _Sizes(cell, font=min(10.0, max(5.0, cell * 44)))


@dataclass
class _Page:
    """A figure that is measured in inches from its top left corner."""

    figure: Figure
    width: float
    height: float

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        box = (x / self.width, 1 - (y + height) / self.height, width / self.width, height / self.height)
        return self.figure.add_axes(box)

    def text(self, x: float, y: float, words: str, **style: Any) -> None:
        # a token may hold a dollar sign, which is no mathematics here
        self.figure.text(x / self.width, 1 - y / self.height, words, family=_families(), parse_math=False, **style)


def _cells(page: _Page, panel: _Panel, x: float, y: float, sizes: _Sizes, top: float) -> None:
    n, m = panel.weights.shape
    axes = page.axes(x, y, m * sizes.cell, n * sizes.cell)
    axes.imshow(panel.weights.numpy(), cmap=_colours(), vmin=0.0, vmax=top, aspect="auto", interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xticks([i - 0.5 for i in range(1, m)], minor=True)
    axes.set_yticks([i - 0.5 for i in range(1, n)], minor=True)
    # lines in the darkest colour part the bright cells and vanish between the dark ones
    axes.grid(which="minor", color=_COLOURS[0], linewidth=sizes.cell * 2)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set(linewidth=0.8, color=_COLOURS[0])  # a white cell at the edge must not run into the page


def _words(page: _Page, panel: _Panel, x: float, y: float, sizes: _Sizes) -> None:
    rotation = 0 if _flat(panel, sizes) else 90
    for i, word in enumerate(panel.source):
        style: dict[str, Any] = {"ha": "center", "va": "baseline" if rotation == 0 else "bottom", "rotation": rotation}
        page.text(x + (i + 0.5) * sizes.cell, y - sizes.pad, word, size=sizes.font, color=_INK, **style)
    for i, word in enumerate(panel.target):
        style = {"ha": "right", "va": "center_baseline"}
        page.text(x - sizes.pad, y + (i + 0.5) * sizes.cell, word, size=sizes.font, color=_INK, **style)


def _bar(page: _Page, x: float, y: float, height: float, sizes: _Sizes, top: float) -> None:
    axes = page.axes(x, y, sizes.bar, height)
    shades = torch.linspace(1, 0, 256)[:, None].numpy()
    axes.imshow(shades, cmap=_colours(), vmin=0, vmax=1, aspect="auto", extent=(0, 1, 0, 1))
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set(linewidth=0.5, color=_GREY)
    style: dict[str, Any] = {"size": 7, "color": _GREY, "ha": "left"}
    page.text(x + sizes.bar + 0.05, y, f"{top:.2g}", va="top", **style)
    page.text(x + sizes.bar + 0.05, y + height, "0", va="bottom", **style)


# ---- measuring ------------------------------------------------------------------------------------------------------


def _left(panel: _Panel, sizes: _Sizes) -> float:
    """Room for the output's words."""
    return max((_extent(word, sizes.font) + sizes.pad for word in panel.target), default=0.0)


def _top(panel: _Panel, sizes: _Sizes) -> float:
    """Room for the caption and the input's words."""
    words = 0.0
    if panel.source:
        line = sizes.font * 1.1 * _POINT
        words = sizes.pad + (line if _flat(panel, sizes) else max(_extent(w, sizes.font) for w in panel.source))
    return words + (sizes.caption if panel.caption is not None else 0.0)


def _width(panel: _Panel, sizes: _Sizes) -> float:
    caption = 0.0 if panel.caption is None else _extent(panel.caption, sizes.font)
    return max(panel.weights.shape[1] * sizes.cell, caption)


def _flat(panel: _Panel, sizes: _Sizes) -> bool:
    """True where every input word fits above its own cell; otherwise they all stand upright."""
    return all(_extent(word, sizes.font) < 0.94 * sizes.cell for word in panel.source)


def _extent(words: str, size: float, bold: bool = False) -> float:
    """Width of a line of text in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=_families(), size=size, weight="bold" if bold else "normal")
    width, _, _ = text_to_path.get_text_width_height_descent(words, font, ismath=False)
    return float(width) * _POINT


@cache
def _families() -> list[str]:
    """The font that comes with matplotlib, and behind it what the machine has for scripts that it lacks."""
    from matplotlib.font_manager import get_font_names

    wide = ("Noto Sans CJK SC", "Noto Sans CJK JP", "PingFang SC", "Hiragino Sans", "Microsoft YaHei", "Noto Sans")
    return ["DejaVu Sans", *sorted(set(wide) & set(get_font_names()))]


@cache
def _colours() -> Colormap:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("alignment", _COLOURS)


# ---- writing --------------------------------------------------------------------------------------------------------


def _file(path: str | os.PathLike[str]) -> Path:
    """The file to write, refused before any work is done if it could not be written."""
    file = Path(path)
    if file.suffix.lower() not in _SUFFIXES:
        raise InputError(f"{file}: a picture is written as {', '.join(_SUFFIXES)}, not as '{file.suffix}'")
    if not file.parent.is_dir():
        raise InputError(f"{file}: there is no folder '{file.parent}'; make it first")
    return file


def _write(figure: Figure, file: Path) -> None:
    """Beside it and then renamed: a picture is there whole or not at all."""
    from matplotlib import rc_context

    kind = file.suffix.lower()[1:]
    drawn = io.BytesIO()
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)  # the same weights give the same file
    with rc_context({"svg.hashsalt": "qkv"}):
        figure.savefig(drawn, format=kind, metadata=dates)
    write_bytes(file, drawn.getvalue())
