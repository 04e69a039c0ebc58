"""Pictures varied at random, so that a small set of them is learned from as if it were a larger one.

What is drawn is a function of seed, epoch and the picture's number alone (see `qkv.data.rng`): new in every epoch,
the same after a resume, and whoever shares its batch. All of a batch is varied at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from qkv.data.examples import Pixels
from qkv.data.rng import CounterRNG, Floats, Ints, uniform
from qkv.errors import InputError

_RNG_STREAM = "picture"
_DRAWS_PER_IMAGE = 8  # numbers a picture, so that what one kind of change draws does not depend on whether another is on
_ERASED_AREA_RANGE = 0.02, 1 / 3  # shares of the picture that are erased at least and at most
_MAX_ASPECT_RATIO = 3.0  # times that an erased side is longer than the other at most


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Which changes a picture may undergo, in this order."""

    horizontal_flip: bool = False  # every second one is turned left to right
    max_shift: int = 0  # moved by at most so many pixels each way; what comes in is black, as is what lies outside
    random_erasing: float = 0.0  # share of the pictures of which a rectangle is painted over (Zhong et al. 2020)

    def __post_init__(self) -> None:
        if not isinstance(self.horizontal_flip, bool):
            raise InputError(f"task.horizontal_flip is true or false, not {self.horizontal_flip!r}")
        if not isinstance(self.max_shift, int) or isinstance(self.max_shift, bool) or self.max_shift < 0:
            raise InputError(f"task.max_shift is a number of pixels, 0 or more, not {self.max_shift!r}")
        if isinstance(self.random_erasing, bool) or not isinstance(self.random_erasing, int | float) or not 0 <= self.random_erasing <= 1:
            raise InputError(f"task.random_erasing is a share of the pictures, from 0 to 1, not {self.random_erasing!r}")

    @property
    def enabled(self) -> bool:
        return self.horizontal_flip or self.max_shift > 0 or self.random_erasing > 0

    def __call__(self, pixels: Pixels, rng: CounterRNG, indices: Ints, fill: Pixels) -> Pixels:
        """Pictures of these numbers, changed; `fill` is the colour of what is erased.  # [B, H, W, C], [C]"""
        if not self.enabled:
            return pixels
        draws = uniform(rng.random_bits_table(indices, _DRAWS_PER_IMAGE, _RNG_STREAM))  # [B, 8]
        pixels = pixels.copy()
        if self.horizontal_flip:
            is_flipped = draws[:, 0] < 0.5
            pixels[is_flipped] = pixels[is_flipped, :, ::-1]
        if self.max_shift:
            pixels = _random_shift(pixels, self.max_shift, draws[:, 1:3])
        if self.random_erasing:
            _random_erase(pixels, draws[:, 3] < self.random_erasing, draws[:, 4:], fill)
        return pixels


def _random_shift(pixels: Pixels, max_shift: int, draws: Floats) -> Pixels:
    """Padded on all sides, and cut to its size again somewhere in there.  # [B, H, W, C], [B, 2]"""
    count, height, width, _ = pixels.shape
    padded = np.pad(pixels, ((0, 0), (max_shift, max_shift), (max_shift, max_shift), (0, 0)))
    top, left = (draws * (2 * max_shift + 1)).astype(np.int64).T
    # [B, places down, places across, C, H, W], of which one place each is copied
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
    shifted: Pixels = windows[np.arange(count), top, left].transpose(0, 2, 3, 1)
    return np.ascontiguousarray(shifted)


def _random_erase(pixels: Pixels, is_selected: np.ndarray, draws: Floats, fill: Pixels) -> None:
    """Paints a rectangle of random size, shape and place over the chosen pictures.  # [B, H, W, C], [B], [B, 4]"""
    (indices,) = np.nonzero(is_selected)
    height, width = pixels.shape[1:3]
    area_draws, aspect_draws, top_draws, left_draws = draws[indices].T
    area = height * width * (_ERASED_AREA_RANGE[0] + area_draws * (_ERASED_AREA_RANGE[1] - _ERASED_AREA_RANGE[0]))
    ratio = np.exp((2 * aspect_draws - 1) * math.log(_MAX_ASPECT_RATIO))
    heights, top = _random_extent(np.sqrt(area * ratio), height, top_draws)
    widths, left = _random_extent(np.sqrt(area / ratio), width, left_draws)
    y, x = np.arange(height), np.arange(width)
    inside = ((y >= top) & (y < top + heights))[:, :, None] & ((x >= left) & (x < left + widths))[:, None]  # [N, H, W]
    erased = pixels[indices]
    erased[inside] = fill
    pixels[indices] = erased


def _random_extent(side_lengths: Floats, image_side: int, draws: Floats) -> tuple[Ints, Ints]:
    """How long a side is, in pixels, and where it begins.  # [N, 1], [N, 1]"""
    extents = np.clip(np.rint(side_lengths), 1, image_side).astype(np.int64)
    return extents[:, None], (draws * (image_side - extents + 1)).astype(np.int64)[:, None]
