"""Image augmentation: random flips, shifts and erasing, applied to whole batches.

The random numbers depend on seed, epoch and the index of the image only (see `qkv.data.rng`): new in every epoch, the
same after a resume, and independent of the other images of the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from qkv.data.examples import Pixels
from qkv.data.rng import Bools, CounterRNG, Floats, Ints, uniform
from qkv.errors import InputError

_RNG_STREAM = "picture"  # part of the random key: a change would alter existing runs
_DRAWS_PER_IMAGE = 8  # fixed, so that the draws of an augmentation do not depend on whether others are on
_ERASED_AREA_RANGE = 0.02, 1 / 3  # minimum and maximum fraction of the image
_MAX_ASPECT_RATIO = 3.0  # of the erased rectangle


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Augmentations, in the order in which they are applied."""

    horizontal_flip: bool = False
    """Flip half of the images horizontally."""
    max_shift: int = 0
    """Shift each image by up to this many pixels in both directions; pixels from outside are black."""
    random_erasing: float = 0.0
    """Fraction of the images in which a random rectangle is erased (Zhong et al. 2020)."""

    def __post_init__(self) -> None:
        if not isinstance(self.horizontal_flip, bool):
            raise InputError(f"task.horizontal_flip is true or false, not {self.horizontal_flip!r}")
        if not isinstance(self.max_shift, int) or isinstance(self.max_shift, bool) or self.max_shift < 0:
            raise InputError(f"task.max_shift is a number of pixels, 0 or more, not {self.max_shift!r}")
        if (
            isinstance(self.random_erasing, bool)
            or not isinstance(self.random_erasing, int | float)
            or not 0 <= self.random_erasing <= 1
        ):
            raise InputError(
                f"task.random_erasing is a fraction of the images, from 0 to 1, not {self.random_erasing!r}"
            )

    @property
    def enabled(self) -> bool:
        """Whether any augmentation is on."""
        return self.horizontal_flip or self.max_shift > 0 or self.random_erasing > 0

    def __call__(self, pixels: Pixels, rng: CounterRNG, indices: Ints, fill: Pixels) -> Pixels:
        """Augment the images of the given indices; `fill` is the color of erased pixels.  # [B, H, W, C], [C]"""
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
    """Pad the images on all sides and crop them at a random position.  # [B, H, W, C], [B, 2]"""
    count, height, width, _ = pixels.shape
    padded = np.pad(pixels, ((0, 0), (max_shift, max_shift), (max_shift, max_shift), (0, 0)))
    top, left = (draws * (2 * max_shift + 1)).astype(np.int64).T
    # [B, vertical, horizontal, C, H, W]: one window per image is copied
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
    shifted: Pixels = windows[np.arange(count), top, left].transpose(0, 2, 3, 1)
    return np.ascontiguousarray(shifted)


def _random_erase(pixels: Pixels, is_selected: Bools, draws: Floats, fill: Pixels) -> None:
    """Erase a rectangle of random size, shape and position in the selected images.  # [B, H, W, C], [B], [B, 4]"""
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
    """Return the length of a side in pixels, and its random start.  # [N, 1], [N, 1]"""
    extents = np.clip(np.rint(side_lengths), 1, image_side).astype(np.int64)
    return extents[:, None], (draws * (image_side - extents + 1)).astype(np.int64)[:, None]
