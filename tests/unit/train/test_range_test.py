"""The learning-rate range test on curves whose answer is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qkv.errors import InputError
from qkv.train.perf.lr_range_test import RangeTest, exponential_average, exponential_lr, local_slopes


def learns(rate: float) -> float:
    """Falls from 10 to 6, fastest at 3e-4, and leaves from 0.03 on."""
    place = math.log10(rate)
    return 6 + 4 / (1 + math.exp(4 * (place - math.log10(3e-4)))) + math.exp(6 * (place + 1.2))


def only_leaves(rate: float) -> float:
    return 2 + math.exp(4 * (math.log10(rate) + 1.5))


def told(loss: Callable[[float], float], noise: float = 0.0, seed: int = 1) -> RangeTest:
    chance, test = random.Random(seed), RangeTest()
    for step in range(1, test.steps + 1):
        if not test.add(step, loss(test.learning_rate_at(step)) + noise * chance.gauss(0, 1)):
            break
    return test


def test_rates_grow_by_one_factor_from_the_lowest_to_the_highest() -> None:
    rates = [exponential_lr(step, min_lr=1e-6, max_lr=1e-2, steps=5) for step in range(1, 6)]
    assert rates == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3, 1e-2])


def test_a_smoothed_loss_is_the_weighted_mean_of_those_so_far() -> None:
    values = [3.0, 5.0, 1.0]
    weights = [0.9**2, 0.9, 1.0]
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert exponential_average(values, decay=0.9)[-1] == pytest.approx(mean)
    assert exponential_average([7.0] * 30) == pytest.approx([7.0] * 30)  # from the first on


def test_the_slope_of_a_line_is_found_everywhere() -> None:
    x = np.array([0.0, 1.0, 3.0, 4.0, 9.0])
    assert local_slopes(x.tolist(), (5 - 2 * x).tolist(), radius=2) == pytest.approx([-2.0] * 5)


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
def test_the_suggestion_is_where_the_loss_falls_fastest(noise: float) -> None:
    found = told(learns, noise).suggested_lr()
    assert 3e-4 / 3 < found < 3e-4 * 3


def test_it_goes_on_while_the_loss_is_near_its_best_and_stops_when_it_leaves() -> None:
    test = told(learns)
    assert 80 < len(test.losses) < test.steps
    curve = exponential_average(test.losses)
    assert curve[-1] > 4 * min(curve) > curve[-2]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_it_and_is_forgotten(loss: float) -> None:
    test = RangeTest()
    assert test.add(1, 5.0)
    assert not test.add(2, loss)
    assert test.losses == [5.0]


def test_it_ends_after_its_last_step() -> None:
    test = RangeTest(steps=20)
    assert [test.add(step, 1.0) for step in range(1, 21)] == [True] * 19 + [False]


@pytest.mark.parametrize("loss", [only_leaves, lambda _: 2.0])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_where_nothing_falls_nothing_is_suggested(loss: Callable[[float], float], noise: float) -> None:
    with pytest.raises(InputError, match=r"no learning rate between 1e-07 and .* made the loss fall clearly"):
        told(loss, noise).suggested_lr()


def test_a_loss_that_leaves_at_once_is_said_to() -> None:
    with pytest.raises(InputError, match="diverged after 5 steps of growing rates; start below 1e-07"):
        told(lambda rate: 2.0 if rate < 1.8e-7 else 1e9).suggested_lr()


def test_the_table_has_a_line_a_step() -> None:
    test = told(learns)
    head, first, *others = test.tsv().splitlines()
    assert head.split("\t") == ["step", "rate", "loss", "smoothed"]
    assert first.split("\t") == ["1", "1e-07", "10", "10"]
    assert len(others) == len(test.losses) - 1


def reddish(path: Path) -> np.ndarray:
    """Which pixels are the mark's."""
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    return (pixels[..., 0] > 150) & (pixels[..., 1] < 110) & (pixels[..., 2] < 90)


def test_the_plot_marks_the_suggestion_and_only_where_there_is_one(tmp_path: Path) -> None:
    told(learns, 0.1).plot(tmp_path / "found.png")
    told(only_leaves).plot(tmp_path / "none.png")
    marked = reddish(tmp_path / "found.png")
    tallest = int(marked.sum(0).argmax())  # the column of the dashed line
    assert marked[:, tallest].sum() > 0.3 * len(marked)
    assert 0.4 < tallest / marked.shape[1] < 0.65  # 3e-4 on an axis from 1e-7 to about 0.3
    assert not reddish(tmp_path / "none.png").any()


def test_without_a_single_loss_there_is_nothing_to_plot(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to plot"):
        RangeTest().plot(tmp_path / "none.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1e-3, 1e-3), (1.0, 1e-3), (1e-5, math.inf)])
def test_bounds_that_are_no_range_are_refused(low: float, high: float) -> None:
    with pytest.raises(InputError, match="needs 0 < min_lr < max_lr"):
        RangeTest(low, high)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(InputError, match="at least 20 steps"):
        RangeTest(steps=19)
