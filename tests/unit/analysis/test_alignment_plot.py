"""Alignment plots: the right picture, readable at any length, whole or not there at all."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from torch import Tensor

from qkv.analysis import plot, plot_alignment, plot_alignments
from qkv.analysis.alignments import Alignment
from qkv.errors import InputError

LETTERS, PHONES = list("attention"), ["AH0", "T", "EH1", "N", "SH", "AH0", "N", "</s>"]
SENTENCE = ["The", "agreement", "on", "the", "European", "Economic", "Area", "was", "signed", "in", "1992", "."]
OTHER = ["L'", "accord", "sur", "la", "zone", "économique", "européenne", "a", "été", "signé", "en", "1992", "."]
LONG = [f"token{i}" for i in range(40)]
Figures = list[Any]


def soft(target: list[str], source: list[str], heads: int | None = None) -> Tensor:
    torch.manual_seed(0)
    shape = (len(target), len(source))
    return torch.randn(shape if heads is None else (heads, *shape)).mul(2).softmax(-1)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Figures:
    """The figures that were drawn."""
    drawn: Figures = []
    finish = plot.finish_figure

    def keep(figure: Any, file: Path | None) -> Any:
        drawn.append(figure)
        return finish(figure, file)

    monkeypatch.setattr(plot, "finish_figure", keep)
    return drawn


def shown(figure: Any) -> list[Tensor]:
    """The matrices on a figure; its last axes are the colour bar."""
    return [torch.tensor(axes.images[0].get_array().data) for axes in figure.axes[:-1]]


def words(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.texts]


@pytest.mark.parametrize(
    ("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")]
)
def test_the_suffix_says_what_is_written(tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = tmp_path / f"word{suffix}"
    plot_alignment(soft(PHONES, LETTERS), LETTERS, PHONES, path)
    assert path.read_bytes().startswith(magic)
    assert os.listdir(tmp_path) == [path.name]


def test_white_is_larger_input_goes_across_and_output_down(tmp_path: Path, figures: Figures) -> None:
    """'Alignments' example: Bahdanau et al. (Sequence to Sequence models: Attention Models)."""
    weights = torch.tensor([[0.1, 0.6, 0.3], [0.8, 0.2, 0.0]])
    plot_alignment(weights, ["a", "b", "c"], ["x", "y"], path := tmp_path / "a.png")
    (figure,) = figures
    picture = imread(path)  # [height, width, 4]
    cells = figure.axes[0].get_window_extent()
    light = torch.empty(2, 3)
    for row in range(2):
        for column in range(3):
            x = cells.x0 + cells.width * (column + 0.5) / 3
            y = picture.shape[0] - cells.y1 + cells.height * (row + 0.5) / 2
            light[row, column] = float(picture[int(y), int(x), :3].mean())
    assert torch.equal(light.flatten().argsort(), weights.flatten().argsort())
    assert light.max() > 0.99


@pytest.mark.parametrize(
    ("source", "target"), [(list("cat"), ["K", "AE1", "T"]), (LETTERS, PHONES), (SENTENCE, OTHER), (LONG, LONG[:38])]
)
@pytest.mark.parametrize("heads", ["mean", "each"])
def test_nothing_overlaps_and_cells_are_square(
    tmp_path: Path, figures: Figures, source: list[str], target: list[str], heads: Any
) -> None:
    plot_alignment(soft(target, source, 3), source, target, tmp_path / "a.png", title="A title", heads=heads)
    (figure,) = figures
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [text.get_window_extent(renderer) for text in figure.texts]
    panels = [axes.get_window_extent() for axes in figure.axes]
    for a, b in combinations([*boxes, *panels], 2):
        assert not a.padded(-1).overlaps(b.padded(-1))
    for box in [*boxes, *panels]:
        assert figure.bbox.padded(1).contains(box.x0, box.y0)
        assert figure.bbox.padded(1).contains(box.x1, box.y1)
    for panel in panels[:-1]:
        assert panel.width / len(source) == pytest.approx(panel.height / len(target))
    assert min(text.get_size() for text in figure.texts) >= 5


def test_the_mean_of_the_heads_is_shown_unless_asked_otherwise(tmp_path: Path, figures: Figures) -> None:
    weights = soft(PHONES, LETTERS, 4)
    plot_alignment(weights, LETTERS, PHONES, tmp_path / "a.png")
    (mean,) = shown(figures[0])
    assert torch.allclose(mean, weights.mean(0))


@pytest.mark.parametrize(("heads", "numbers"), [("each", [0, 1, 2, 3]), ([2, 0], [2, 0])])
def test_a_panel_a_head_with_its_number(tmp_path: Path, figures: Figures, heads: Any, numbers: list[int]) -> None:
    weights = soft(PHONES, LETTERS, 4)
    plot_alignment(weights, LETTERS, PHONES, tmp_path / "a.png", heads=heads, title="attention")
    panels = shown(figures[0])
    assert all(torch.equal(panel, weights[h]) for panel, h in zip(panels, numbers, strict=True))
    assert [w for w in words(figures[0]) if w.startswith("head")] == [f"head {h}" for h in numbers]
    assert "attention" in words(figures[0])
    assert words(figures[0]).count("SH") == 1  # neighbours share their labels


def test_several_words_stand_side_by_side_on_one_scale(tmp_path: Path, figures: Figures) -> None:
    items = [
        (soft(PHONES, LETTERS, 2), LETTERS, PHONES, "attention"),
        (soft(["K", "T"], list("cat")), list("cat"), ["K", "T"], None),
    ]
    plot_alignments(items, tmp_path / "a.png", title="Letters and phones")
    (figure,) = figures
    assert [tuple(panel.shape) for panel in shown(figure)] == [(8, 9), (2, 3)]
    assert len({axes.images[0].get_clim() for axes in figure.axes[:-1]}) == 1
    tops = {round(axes.get_window_extent().y1) for axes in figure.axes}
    assert len(tops) == 1  # aligned, the colour bar too
    assert {"attention", "Letters and phones", "K"} <= set(words(figure))


def test_a_dollar_sign_is_a_dollar_sign_and_white_space_has_a_name(tmp_path: Path, figures: Figures) -> None:
    tokens = ["$x_1$", "a\nb", " ", ""]
    plot_alignment(soft(tokens, tokens), tokens, tokens, tmp_path / "a.png")
    assert words(figures[0])[:4] == ["$x_1$", "a b", "␣", "␣"]
    assert not any(text.get_parse_math() for text in figures[0].texts)


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_same_weights_give_the_same_file(tmp_path: Path, suffix: str) -> None:
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    for path in (first, second):
        plot_alignment(soft(PHONES, LETTERS), LETTERS, PHONES, path)
    assert first.read_bytes() == second.read_bytes()


def test_a_figure_is_returned_that_a_notebook_shows_without_a_file() -> None:
    aligned = Alignment(soft(PHONES, LETTERS, 2), LETTERS, PHONES, "decoder.0.cross_attention")
    for figure in (plot_alignments([aligned]), plot_alignment(aligned.weights, LETTERS, PHONES, heads="each")):
        assert figure._repr_png_().startswith(b"\x89PNG")


def test_weights_of_any_kind_are_taken(tmp_path: Path, figures: Figures) -> None:
    weights = soft(PHONES, LETTERS, 2)
    plot_alignment(weights.to(torch.bfloat16).requires_grad_(), LETTERS, PHONES, tmp_path / "a.png")
    assert torch.allclose(shown(figures[0])[0], weights.mean(0), atol=1e-2)
    plot_alignment(torch.zeros(2, 3), list("abc"), list("xy"), tmp_path / "zero.png")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "a.jpeg"}, r"a\.jpeg: a plot is saved as \.png, \.svg, \.pdf, not as '\.jpeg'"),
        ({"path": "a"}, "a plot is saved as"),
        ({"path": "none/a.png"}, "there is no folder"),
        ({"target": PHONES[1:]}, "weights are for 8 output and 9 input tokens, labels for 7 and 9"),
        ({"weights": torch.rand(2, 2, 8, 9)}, r"shape \[2, 2, 8, 9\]"),
        ({"weights": torch.full((8, 9), float("nan"))}, "finite"),
        ({"weights": torch.rand(0, 9), "target": []}, "0 output"),
        ({"heads": "means"}, "did you mean 'mean'"),
        ({"heads": [4]}, "from 0 to 3, not 4"),
        ({"heads": []}, "none given"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    asked = {"weights": soft(PHONES, LETTERS, 4), "source": LETTERS, "target": PHONES, "path": "a.png"} | change
    with pytest.raises(InputError, match=message) as error:
        plot_alignment(**asked | {"path": tmp_path / asked["path"]})
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == []
    with pytest.raises(InputError, match="nothing to draw"):
        plot_alignments([], tmp_path / "a.png")


def test_a_failed_write_leaves_the_old_picture_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(b"old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match=r"a\.png: cannot be saved: No space left on device"):
        plot_alignment(soft(PHONES, LETTERS), LETTERS, PHONES, tmp_path / "a.png")
    assert os.listdir(tmp_path) == ["a.png"]
    assert (tmp_path / "a.png").read_bytes() == b"old"


def test_matplotlib_is_imported_only_to_draw_and_pyplot_never(tmp_path: Path) -> None:
    code = f"""
import sys, torch
import qkv.analysis
assert "matplotlib" not in sys.modules
qkv.analysis.plot_alignment(torch.eye(2), ["a", "b"], ["x", "y"], {str(tmp_path / "a.png")!r})
assert "matplotlib.pyplot" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
