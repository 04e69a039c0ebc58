"""Pictures are varied as their settings say, by seed, epoch and number alone."""

from __future__ import annotations

import numpy as np
import pytest

from qkv.data.augmentation import Augmentation
from qkv.data.rng import CounterRNG, uniform
from qkv.errors import InputError

CHANCE = CounterRNG(3, 5)
NUMBERS = np.arange(400)
PIXELS = np.random.default_rng(1).integers(1, 256, (400, 9, 11, 3), dtype=np.uint8)
FILL = np.array([0, 7, 255], np.uint8)
ALL = Augmentation(horizontal_flip=True, max_shift=2, random_erasing=0.5)


def changed(how: Augmentation, chance: CounterRNG = CHANCE, at: np.ndarray = NUMBERS) -> np.ndarray:
    return how(PIXELS[at], chance, at, FILL)


def test_a_picture_is_varied_alike_whoever_shares_its_batch() -> None:
    some = np.array([17, 3, 399, 240])
    assert np.array_equal(changed(ALL, at=some), changed(ALL)[some])


@pytest.mark.parametrize("other", [CounterRNG(3, 6), CounterRNG(4, 5)])
def test_another_epoch_and_another_seed_vary_otherwise(other: CounterRNG) -> None:
    assert np.array_equal(changed(ALL), changed(ALL))
    same = (changed(ALL, other) == changed(ALL)).all((1, 2, 3))
    assert same.mean() < 0.2


def test_what_is_given_stays_as_it_was() -> None:
    before = PIXELS.copy()
    changed(ALL)
    assert np.array_equal(PIXELS, before)
    assert changed(Augmentation()) is not None
    assert np.array_equal(changed(Augmentation()), before)


def test_about_half_of_the_pictures_are_turned_left_to_right() -> None:
    found = changed(Augmentation(horizontal_flip=True))
    turned = (found == PIXELS[:, :, ::-1]).all((1, 2, 3))
    assert (turned | (found == PIXELS).all((1, 2, 3))).all()
    assert 0.4 < turned.mean() < 0.6


def test_pictures_are_moved_to_every_place_and_black_comes_in() -> None:
    found = changed(Augmentation(max_shift=1))
    moves: set[tuple[int, int]] = set()
    for before, after in zip(PIXELS, found, strict=True):
        padded = np.pad(before, ((1, 1), (1, 1), (0, 0)))
        fitting = [(y, x) for y in range(3) for x in range(3) if np.array_equal(padded[y : y + 9, x : x + 11], after)]
        assert len(fitting) == 1
        moves.update(fitting)
    assert len(moves) == 9


def test_one_rectangle_is_erased_in_the_share_of_pictures_that_was_asked_for() -> None:
    found = changed(Augmentation(random_erasing=0.4))
    touched = (found != PIXELS).any(-1)  # [B, H, W]
    hit = touched.any((1, 2))
    assert 0.33 < hit.mean() < 0.47
    for picture, mask in zip(found[hit], touched[hit], strict=True):
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        area = picture[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert (area == FILL).all()
        assert mask.sum() <= 99 / 3 + 6  # a third, and what rounding to whole pixels adds


def test_one_kind_of_change_draws_the_same_whether_another_is_on_or_not() -> None:
    both, alone = (
        changed(Augmentation(horizontal_flip=True, random_erasing=1.0)),
        changed(Augmentation(random_erasing=1.0)),
    )
    assert np.array_equal((both == FILL).all(-1).sum((1, 2)) > 0, (alone == FILL).all(-1).sum((1, 2)) > 0)
    turned = (changed(Augmentation(horizontal_flip=True)) != PIXELS).any((1, 2, 3))
    kept = (both == FILL).all(-1) | (both == np.where(turned[:, None, None, None], PIXELS[:, :, ::-1], PIXELS)).all(-1)
    assert kept.all()


@pytest.mark.parametrize(
    "settings",
    [
        {"horizontal_flip": 1},
        {"max_shift": -1},
        {"max_shift": 1.5},
        {"random_erasing": 1.5},
        {"random_erasing": "often"},
    ],
)
def test_a_setting_that_makes_no_sense_is_named(settings: dict[str, object]) -> None:
    with pytest.raises(InputError, match=f"task.{next(iter(settings))} is"):
        Augmentation(**settings)  # type: ignore[arg-type]


def test_a_table_of_words_looks_random_and_is_each_numbers_own() -> None:
    table = uniform(CHANCE.random_bits_table(np.arange(5000), 8, "use"))
    assert np.array_equal(uniform(CHANCE.random_bits_table(np.array([42]), 8, "use"))[0], table[42])
    assert not np.isin(
        CHANCE.random_bits_table(np.arange(50), 8, "other"), CHANCE.random_bits_table(np.arange(50), 8, "use")
    ).any()
    assert np.abs(table.mean(0) - 0.5).max() < 0.02
    assert np.abs(table.std(0) - 12**-0.5).max() < 0.01
    assert np.abs(np.corrcoef(np.hstack([table[1:], table[:-1]]).T) - np.eye(16)).max() < 0.06
    with pytest.raises(InputError, match="set both to 0 or more"):
        CounterRNG(1, -1).random_bits_table(np.arange(2), 1, "use")
