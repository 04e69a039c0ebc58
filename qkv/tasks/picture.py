"""Image classification: one of several labels for a picture (Dosovitskiy et al. 2021, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from qkv import spec
from qkv.data.augmentation import Augmentation
from qkv.data.chance import Chance
from qkv.data.examples import Pictured, Pixels
from qkv.data.images import Images, refuse_mixed
from qkv.errors import InputError
from qkv.nn import Layout, Ragged
from qkv.objectives.label import Inputs
from qkv.tasks.classify import OneOf, numbers_of
from qkv.tasks.task import Asked

Numbers = float | Sequence[float] | None


class Seen(NamedTuple):
    """A picture, and how the model wants it prepared."""

    example: Pictured
    images: Images

    def content(self) -> bytes:
        """What of it a checkpoint depends on."""
        return self.example.content()


@dataclass(frozen=True, kw_only=True)
class Picture(OneOf):
    """See `qkv.tasks.task.Task`."""

    # taken away from pixels between 0 and 1, and what is left is divided by: one number, or one a channel;
    # None: the model's own, of a fresh one 0.5
    mean: Numbers = None
    deviation: Numbers = None
    # how what is learned from is varied: see `qkv.data.augmentation`
    flip: bool = False
    shift: int = 0
    erase: float = 0.0

    name = "picture"
    example = Pictured

    def __post_init__(self) -> None:
        _ = self.augmentation  # says what is wrong with its settings

    @property
    def augmentation(self) -> Augmentation:
        return Augmentation(flip=self.flip, shift=self.shift, erase=self.erase)

    def images(self, s: spec.Patches, own: Images | None) -> Images:
        """How a model's pictures are prepared: as it came with it, or to its size and channels."""
        if self.shift >= s.image:
            raise InputError(f"task.shift: {self.shift} pixels move a picture of {s.image} out of sight; give fewer")
        half = (0.5,) * s.channels
        made = own or Images(rgb=s.channels == 3, size=(s.image, s.image), mean=half, deviation=half)
        told = {"mean": self.mean, "deviation": self.deviation}
        said: dict[str, Any] = {n: _by_channel(n, given, s.channels) for n, given in told.items() if given is not None}
        made = replace(made, written=None, **said) if said else made
        if (made.mean is None) != (made.deviation is None):
            raise InputError("task.mean and task.deviation: this model has neither of its own; give both")
        return made

    def ask(self, examples: Sequence[Pictured], images: Images, labels: Sequence[str], longest: int) -> list[Asked]:
        """A picture counts as the tokens that its patches become; it is opened when its turn comes."""
        right = zip(examples, self.right(examples, labels), strict=True)
        places = (range(longest),)
        return [Asked(i, places, (), label, about=Seen(one, images)) for i, (one, label) in enumerate(right)]

    def prepare(self, asked: Sequence[Asked], segments: bool) -> Inputs:  # noqa: ARG002  # a picture has none
        return self._packed(asked, _pixels(asked))

    def varied(self, asked: Sequence[Asked], chance: Chance) -> Inputs:
        """The same for training: as the settings say, at random."""
        images = asked[0].about.images
        mean = images.mean or (0.0,)
        factor = 1.0 if images.factor is None else images.factor
        fill = np.array([round(share / factor) for share in mean]).clip(0, 255).astype(np.uint8)
        numbers = np.array([one.example for one in asked], dtype=np.int64)
        return self._packed(asked, self.augmentation(_pixels(asked), chance, numbers, fill))

    def _packed(self, asked: Sequence[Asked], pixels: Pixels) -> Inputs:
        # the layout of the tokens that the pictures become goes with them, so that it is ready on the device
        layout = Layout([asked[0].length] * len(asked))
        source = Ragged(asked[0].about.images.scaled(pixels), layout)  # [B, C, H, W]
        return Inputs(source, None, None, numbers_of(asked))


def _pixels(asked: Sequence[Asked]) -> Pixels:
    """Pictures in the model's size and colours.  # [B, H, W, C]"""
    images, pictures = asked[0].about.images, [one.about.example.picture for one in asked]
    if images.fits(pictures[0]) and len({getattr(one, "shape", None) for one in pictures}) == 1:
        return np.stack(pictures).reshape(len(pictures), *pictures[0].shape[:2], -1)
    found = [images.pixels(one) for one in pictures]
    refuse_mixed(found)
    return np.stack(found)


def _by_channel(field: str, given: Any, channels: int) -> tuple[float, ...]:
    listed = list(given) if isinstance(given, list | tuple) else [given] * channels
    fit = all(isinstance(one, int | float) and not isinstance(one, bool) for one in listed)
    if not fit or len(listed) != channels or (field == "deviation" and min(listed) <= 0):
        more = ", each above 0" if field == "deviation" else ""
        raise InputError(f"task.{field}: {given!r} is not a number, or {channels} of them, one a channel{more}")
    return tuple(float(one) for one in listed)


def make(**settings: Any) -> Picture:
    return Picture(**settings)
