"""Plots of word vectors in the plane of their first two principal components."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qkv.analysis.plot import DPI, INK, check_output_path, finish_figure, font_families
from qkv.errors import InputError, check_names, check_type

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZE = 6.0  # side in inches
_POINT_COLOR = "#5f7db3"
_MIN_WORDS = 3  # any two points are on a line


def plot_vectors(words: Sequence[str], vectors: Tensor, path: str | os.PathLike[str] | None = None) -> Figure:
    """Draw words at their two principal components, and return the figure, which a notebook shows.

    Args:
        words: the labels of the points.
        vectors: one vector per word [N, width].
        path: a .png, .svg or .pdf file to write; None: no file.
    """
    from qkv.analysis.notebook_figure import NotebookFigure

    file = None if path is None else check_output_path(path)
    labels = check_names(words, "words")
    check_type(vectors, Tensor, "vectors", "a tensor with one vector per word")
    if vectors.dim() != 2 or len(vectors) != len(labels):
        raise InputError(f"vectors: {list(vectors.shape)} for {len(labels)} words; give one vector per word")
    points, shares = principal_components(vectors)
    style: dict[str, Any] = {"family": font_families(), "color": INK}
    fig = NotebookFigure(figsize=(_SIZE, _SIZE), dpi=DPI, facecolor="white")
    axes = fig.add_axes((0.1, 0.09, 0.86, 0.87))
    axes.scatter(points[:, 0].tolist(), points[:, 1].tolist(), s=14, color=_POINT_COLOR)
    for label, (x, y) in zip(labels, points.tolist(), strict=True):
        axes.annotate(label.replace("$", r"\$"), (x, y), xytext=(4, 3), textcoords="offset points", fontsize=9, **style)
    axes.margins(0.12)
    axes.set_xlabel(f"first component, {shares[0]:.0%} of the variance", fontsize=8, **style)
    axes.set_ylabel(f"second component, {shares[1]:.0%}", fontsize=8, **style)
    axes.tick_params(labelsize=7, colors=INK, length=2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return finish_figure(fig, file)


def principal_components(vectors: Tensor) -> tuple[Tensor, list[float]]:
    """Return vectors [N, width] in their first two principal components [N, 2], and the share of variance of each."""
    if len(vectors) < _MIN_WORDS:
        raise InputError(f"a plot of {len(vectors)} words has no plane; give {_MIN_WORDS} or more")
    centered = vectors.double() - vectors.double().mean(0)
    left, singular, _ = torch.linalg.svd(centered, full_matrices=False)
    num_components = min(2, len(singular))
    # the sign of a component is arbitrary: its largest value is positive
    points = left[:, :num_components] * singular[:num_components]
    largest = points.gather(0, points.abs().argmax(0, keepdim=True))
    points = torch.nn.functional.pad(points * largest.sign(), (0, 2 - num_components))
    variances = (singular**2 / (singular**2).sum().clamp(min=1e-30))[:2].tolist()
    return points, [*variances, 0.0][:2]
