"""Pictures varied at random, so that a small set of them is learned from as if it were a larger one.

What is drawn is a function of seed, epoch and the picture's number alone (see `qkv.data.chance`): new in every epoch,
the same after a resume, and whoever shares its batch. All of a batch is varied at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from qkv.data.chance import Chance, Floats, Ints, uniform
from qkv.data.examples import Pixels
from qkv.errors import InputError

_USE = "picture"
_DRAWN = 8  # numbers a picture, so that what one kind of change draws does not depend on whether another is on
_AREA = 0.02, 1 / 3  # shares of the picture that are erased at least and at most
_LONGER = 3.0  # times that an erased side is longer than the other at most


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Which changes a picture may undergo, in this order."""

    flip: bool = False  # every second one is turned left to right
    shift: int = 0  # moved by at most so many pixels each way; what comes in is black, as is what lies outside
    erase: float = 0.0  # share of the pictures of which a rectangle is painted over (Zhong et al. 2020)

    def __post_init__(self) -> None:
        if not isinstance(self.flip, bool):
            raise InputError(f"task.flip is true or false, not {self.flip!r}")
        if not isinstance(self.shift, int) or isinstance(self.shift, bool) or self.shift < 0:
            raise InputError(f"task.shift is a number of pixels, 0 or more, not {self.shift!r}")
        if isinstance(self.erase, bool) or not isinstance(self.erase, int | float) or not 0 <= self.erase <= 1:
            raise InputError(f"task.erase is a share of the pictures, from 0 to 1, not {self.erase!r}")

    @property
    def on(self) -> bool:
        return self.flip or self.shift > 0 or self.erase > 0

    def __call__(self, pixels: Pixels, chance: Chance, numbers: Ints, fill: Pixels) -> Pixels:
        """Pictures of these numbers, changed; `fill` is the colour of what is erased.  # [B, H, W, C], [C]"""
        if not self.on:
            return pixels
        drawn = uniform(chance.table(numbers, _DRAWN, _USE))  # [B, 8]
        pixels = pixels.copy()
        if self.flip:
            turned = drawn[:, 0] < 0.5
            pixels[turned] = pixels[turned, :, ::-1]
        if self.shift:
            pixels = _shifted(pixels, self.shift, drawn[:, 1:3])
        if self.erase:
            _erase(pixels, drawn[:, 3] < self.erase, drawn[:, 4:], fill)
        return pixels


def _shifted(pixels: Pixels, most: int, drawn: Floats) -> Pixels:
    """Padded on all sides, and cut to its size again somewhere in there.  # [B, H, W, C], [B, 2]"""
    count, height, width, _ = pixels.shape
    padded = np.pad(pixels, ((0, 0), (most, most), (most, most), (0, 0)))
    top, left = (drawn * (2 * most + 1)).astype(np.int64).T
    # [B, places down, places across, C, H, W], of which one place each is copied
    places = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
    found: Pixels = places[np.arange(count), top, left].transpose(0, 2, 3, 1)
    return np.ascontiguousarray(found)


def _erase(pixels: Pixels, chosen: np.ndarray, drawn: Floats, fill: Pixels) -> None:
    """Paints a rectangle of random size, shape and place over the chosen pictures.  # [B, H, W, C], [B], [B, 4]"""
    (which,) = np.nonzero(chosen)
    height, width = pixels.shape[1:3]
    size, shape, down, across = drawn[which].T
    area = height * width * (_AREA[0] + size * (_AREA[1] - _AREA[0]))
    ratio = np.exp((2 * shape - 1) * math.log(_LONGER))
    rows, top = _stretch(np.sqrt(area * ratio), height, down)
    columns, left = _stretch(np.sqrt(area / ratio), width, across)
    y, x = np.arange(height), np.arange(width)
    inside = ((y >= top) & (y < top + rows))[:, :, None] & ((x >= left) & (x < left + columns))[:, None]  # [N, H, W]
    painted = pixels[which]
    painted[inside] = fill
    pixels[which] = painted


def _stretch(length: Floats, whole: int, drawn: Floats) -> tuple[Ints, Ints]:
    """How long a side is, in pixels, and where it begins.  # [N, 1], [N, 1]"""
    sides = np.clip(np.rint(length), 1, whole).astype(np.int64)
    return sides[:, None], (drawn * (whole - sides + 1)).astype(np.int64)[:, None]
