"""Open, verify and shrink images with Pillow. Imports no torch."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from qkv.errors import InputError, quote
from qkv.files import open_file
from qkv.limits import limit, raise_hint

if TYPE_CHECKING:  # Pillow is imported when the first image is read
    from PIL.Image import Image
    from torch import Tensor

AnyArray = npt.NDArray[Any]
ImageLike: TypeAlias = "str | Path | Image | AnyArray | Tensor"

_CHANNEL_COUNTS = (1, 3, 4)


def image_name(image: ImageLike) -> str:
    """Return the name of an image in messages: its path, or "the image" if it is not a file."""
    return str(image) if isinstance(image, str | Path) else "the image"


def open_image(raw_image: ImageLike, name: str) -> Image:
    """Return a Pillow image with 8 bits per channel.

    A file is rotated as its EXIF data require and converted to RGB without transparency, as in `transformers`.
    """
    from PIL import Image, ImageOps

    if not isinstance(raw_image, str | Path | Image.Image):
        return Image.fromarray(_to_uint8_array(np.asarray(raw_image)))
    with _wrap_pillow_errors(name):
        if isinstance(raw_image, Image.Image):
            raw_image.load()  # Pillow opens files lazily: errors must occur here
            image = raw_image
        else:
            with _open_pillow(Path(raw_image), name) as file:
                image = ImageOps.exif_transpose(file)
    if 0 in image.size:
        raise InputError(f"{name}: has no pixels")
    image = _to_8_bit(image, name)
    return image if isinstance(raw_image, Image.Image) else image.convert("RGB")


def verify_image(path: Path) -> None:
    """Refuse a file that `open_image` would refuse, without decoding more of it than necessary."""
    with _wrap_pillow_errors(str(path)), _open_pillow(path, str(path)) as file:
        file.draft("L", (1, 1))  # reads all bytes of a JPEG, but decodes it at an eighth of its size
        file.load()
    _check_bit_depth(file, str(path))


@contextmanager
def _open_pillow(path: Path, name: str) -> Iterator[Image]:
    """Open an image file; its pixels are counted before any of them is decoded."""
    from PIL import Image as pillow

    max_pixels = limit("image_pixels")
    if pillow.MAX_IMAGE_PIXELS is not None and max_pixels > pillow.MAX_IMAGE_PIXELS:
        pillow.MAX_IMAGE_PIXELS = max_pixels  # the user raised our limit, so that Pillow's must not be lower
    with open_file(path) as file:
        try:
            image = pillow.open(file)
        except pillow.DecompressionBombError:
            raise InputError(f"{name}: the image has too many pixels; {raise_hint('image_pixels')}") from None
        with image:
            if image.width * image.height > max_pixels:
                size = f"{image.width:,} × {image.height:,} pixels"
                raise InputError(f"{name}: the image has {size}; {raise_hint('image_pixels')}")
            yield image


def thumbnail_png(raw_image: ImageLike, max_side: int) -> bytes:
    """Return an image as PNG, shrunk so that no side has more than `max_side` pixels."""
    image = open_image(raw_image, image_name(raw_image)).copy()
    image.thumbnail((max_side, max_side))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _to_8_bit(image: Image, name: str) -> Image:
    """Keep the upper 8 of 16 bits per pixel; Pillow's own conversion would clip nearly everything to white."""
    from PIL import Image as pillow

    _check_bit_depth(image, name)
    if not image.mode.startswith("I;16"):
        return image
    return pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8))


def _check_bit_depth(image: Image, name: str) -> None:
    if image.mode in ("I", "F"):
        raise InputError(f"{name}: has 32 bits per pixel and an unknown value range; save it with 8 or 16 bits")


@contextmanager
def _wrap_pillow_errors(name: str) -> Iterator[None]:
    """Turn the exceptions of Pillow's readers into an `InputError`."""
    from PIL import UnidentifiedImageError

    try:
        yield
    except (InputError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise InputError(f"{name}: not an image; give a JPEG, PNG or another file that Pillow reads") from None
    except Exception as error:  # a broken file can make Pillow's readers raise any exception
        if isinstance(error, OSError) and error.errno is not None:
            raise InputError(f"{name}: cannot be read ({error.strerror})") from None
        reason = quote(" ".join(str(error).split()), 100)
        raise InputError(f"{name}: a broken image ({reason[1:-1]})") from None


def _to_uint8_array(array: AnyArray) -> npt.NDArray[np.uint8]:
    """Convert [H, W], [H, W, C] or [C, H, W] to the layout that Pillow takes."""
    if array.ndim == 3 and array.shape[0] in _CHANNEL_COUNTS:
        array = array.transpose(1, 2, 0)
    if not array.size or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[-1] not in _CHANNEL_COUNTS):
        raise InputError(f"an array of {list(array.shape)} is not an image: give [H, W], [H, W, C] or [C, H, W]")
    if not np.issubdtype(array.dtype, np.integer) or array.min() < 0 or array.max() > 255:
        raise InputError(f"an array of {array.dtype} is not an image: give integers from 0 to 255")
    array = array[..., 0] if array.shape[2:] == (1,) else array
    return np.ascontiguousarray(array, dtype=np.uint8)
