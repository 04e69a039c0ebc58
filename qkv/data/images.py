"""Pictures to what a vision model reads, as the checkpoint's own preprocessor file says."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor

from qkv.errors import InputError
from qkv.files import write_bytes

if TYPE_CHECKING:  # pillow is loaded when a picture is read
    from PIL.Image import Image

PREPROCESSOR = "preprocessor_config.json"

Picture: TypeAlias = "str | Path | Image | np.ndarray | Tensor"

_KINDS = ("ViTImageProcessor", "ViTImageProcessorFast", "ViTFeatureExtractor")
_FILTERS = range(6)  # pillow's: nearest, lanczos, bilinear, bicubic, box, hamming
_KNOWN = {"image_processor_type", "feature_extractor_type", "do_convert_rgb", "do_resize", "size", "default_to_square"}
_KNOWN |= {"resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor"}
_KNOWN |= {"do_normalize", "image_mean", "image_std", "data_format"}
_KNOWN |= {"processor_class", "_valid_processor_keys", "device", "return_tensors", "disable_grouping", "pad_size"}
_CHANNELS = (1, 3, 4)
_PLAIN = ("L", "RGB", "RGBA")  # one byte a channel, so that an array of it means what it shows


@dataclass(frozen=True, kw_only=True)
class Images:
    """What is done to a picture, in this order; the defaults are those of a file that says nothing."""

    rgb: bool = False  # what is transparent is laid on white, and all becomes red, green and blue
    size: tuple[int, int] | int | None = (224, 224)  # height and width; one number: the shorter side's; None: as it is
    resample: int = 2
    crop: tuple[int, int] | None = None  # height and width out of the middle; black where the picture ends
    factor: float | None = 1 / 255
    mean: tuple[float, ...] | None = (0.5, 0.5, 0.5)  # a channel each, taken away; then divided by `deviation`
    deviation: tuple[float, ...] | None = (0.5, 0.5, 0.5)
    kind: str = _KINDS[0]
    written: bytes | None = field(default=None, repr=False, compare=False)  # the file that it was read from

    @classmethod
    def load(cls, path: Path) -> Images:
        """Out of a preprocessor file; what would change the pixels in a way that we do not know is refused by name."""
        try:
            written = path.read_bytes()
            raw = json.loads(written)
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from None
        except ValueError:
            raise InputError(f"{path}: not JSON; restore it from where the checkpoint came from") from None
        if not isinstance(raw, dict):
            raise InputError(f"{path}: holds no JSON object; restore it from where the checkpoint came from")
        return cls(**_fields(raw, str(path)), written=written)

    def save(self, path: Path) -> None:
        """Writes the file that was read, byte for byte; where there was none, one that says the same."""
        fresh = (json.dumps(self._said(), indent=2) + "\n").encode()
        write_bytes(path, fresh if self.written is None else self.written)

    def _said(self) -> dict[str, Any]:
        def sides(size: tuple[int, int]) -> dict[str, int]:
            return {"height": size[0], "width": size[1]}

        said: dict[str, Any] = {"image_processor_type": self.kind, "do_convert_rgb": self.rgb}
        said |= {"do_resize": self.size is not None, "resample": self.resample}
        if self.size is not None:
            said["size"] = {"shortest_edge": self.size} if isinstance(self.size, int) else sides(self.size)
        said |= {"do_center_crop": self.crop is not None} | ({"crop_size": sides(self.crop)} if self.crop else {})
        said |= {"do_rescale": self.factor is not None} | ({"rescale_factor": self.factor} if self.factor else {})
        said["do_normalize"] = self.mean is not None and self.deviation is not None
        if said["do_normalize"]:
            said |= {"image_mean": list(self.mean or ()), "image_std": list(self.deviation or ())}
        return said

    def read(self, picture: Picture) -> Tensor:
        """A file, a pillow image or an array of bytes as the model wants it.  # [C, H, W]"""
        return torch.from_numpy(np.ascontiguousarray(self._scaled(self.pixels(picture)).transpose(2, 0, 1)))

    def pixels(self, picture: Picture) -> np.ndarray:
        """The same in its size and colours, still in bytes.  # [H, W, C]"""
        if self.fits(picture):
            return picture.reshape(*picture.shape[:2], -1)
        name = str(picture) if isinstance(picture, str | Path) else "the picture"
        image = self._framed(self._coloured(_opened(picture, name)))
        pixels = np.asarray(image).reshape(image.height, image.width, -1)  # [H, W, C]
        if self.mean is not None and len(self.mean) != pixels.shape[-1]:
            wanted = f"{PREPROCESSOR} has means for {len(self.mean)}"
            raise InputError(f"{name}: has {pixels.shape[-1]} channels and {wanted}; convert it first")
        return pixels

    def fits(self, picture: Picture) -> TypeGuard[np.ndarray]:
        """Whether it is an array as it should be, so that pillow, which takes its time, has nothing to do."""
        if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.ndim not in (2, 3):
            return False
        channels = 1 if picture.ndim == 2 else picture.shape[-1]
        known = self.mean is not None and channels == len(self.mean) == (3 if self.rgb else channels)
        return known and picture.shape[:2] == self.size == (self.crop or self.size)

    def scaled(self, pixels: np.ndarray) -> Tensor:
        """Pixels of one size as numbers, each what `read` makes of it.  # [B, H, W, C] -> [B, C, H, W]"""
        channels = pixels.shape[-1]
        values = self._scaled(np.repeat(np.arange(256, dtype=np.uint8)[:, None], channels, 1))  # [256, C]
        found = np.empty((len(pixels), channels, *pixels.shape[1:3]), np.float32)
        for channel in range(channels):
            # a byte is never outside, and to look that up first would take longer than the rest
            np.take(values[:, channel], pixels[..., channel], out=found[:, channel], mode="clip")
        return torch.from_numpy(found)

    def read_batch(self, pictures: Iterable[Picture]) -> Tensor:
        """Several pictures of one size.  # [B, C, H, W]"""
        read = [self.read(picture) for picture in pictures]
        refuse_mixed(read)
        return torch.stack(read)

    def _coloured(self, image: Image) -> Image:
        if self.rgb:
            return _on_white(image)
        wanted = None if self.mean is None else len(self.mean)
        if image.mode in _PLAIN and wanted in (None, len(image.getbands())):
            return image
        return image.convert("L" if wanted == 1 else "RGB")

    def _framed(self, image: Image) -> Image:
        if isinstance(self.size, int):
            longer = int(self.size * max(image.size) / min(image.size))
            size = (self.size, longer) if image.width <= image.height else (longer, self.size)
            image = image.resize(size, resample=self.resample)
        elif self.size is not None:
            image = image.resize((self.size[1], self.size[0]), resample=self.resample)  # pillow says width first
        if self.crop is not None:
            left, top = (image.width - self.crop[1]) // 2, (image.height - self.crop[0]) // 2
            image = image.crop((left, top, left + self.crop[1], top + self.crop[0]))
        return image

    def _scaled(self, pixels: np.ndarray) -> np.ndarray:
        """Rounded to single precision where theirs is: behind the factor."""
        factor = 1.0 if self.factor is None else self.factor
        values = (pixels * np.float64(factor)).astype(np.float32)  # [H, W, C]
        if self.mean is None or self.deviation is None:
            return values
        return (values - np.array(self.mean, np.float32)) / np.array(self.deviation, np.float32)


def _opened(picture: Picture, name: str) -> Image:
    from PIL import Image, ImageOps

    if isinstance(picture, np.ndarray | Tensor):
        return Image.fromarray(_bytes(np.asarray(picture)))
    with _refusing(name):
        if isinstance(picture, Image.Image):
            picture.load()  # only now is the file behind it read
            image = picture
        else:
            with Image.open(picture) as file:
                image = ImageOps.exif_transpose(file)
    if 0 in image.size:
        raise InputError(f"{name}: has no pixels")
    image = _in_bytes(image, name)
    return image if isinstance(picture, Image.Image) else image.convert("RGB")  # as theirs: transparency is dropped


def _in_bytes(image: Image, name: str) -> Image:
    """Of 16 bits a pixel the upper 8; pillow itself would make white of all that is not nearly black."""
    from PIL import Image as pillow

    _refuse_unbounded(image, name)
    if not image.mode.startswith("I;16"):
        return image
    return pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8))


def _refuse_unbounded(image: Image, name: str) -> None:
    if image.mode in ("I", "F"):
        raise InputError(f"{name}: has 32 bits a pixel, and nothing says what is white; save it with 8 or 16")


def check(path: Path) -> None:
    """Refuses a file that `Images.read` would refuse, in as little time as that takes."""
    from PIL import Image

    with _refusing(str(path)), Image.open(path) as file:
        file.draft("L", (1, 1))  # of a JPEG all is read, and an eighth of it worked out
        file.load()
    _refuse_unbounded(file, str(path))


def as_png(picture: Picture, side: int) -> bytes:
    """A picture, made smaller where its longer side has more pixels, for a page."""
    image = _opened(picture, str(picture) if isinstance(picture, str | Path) else "the picture").copy()
    image.thumbnail((side, side))
    packed = io.BytesIO()
    image.save(packed, "PNG")
    return packed.getvalue()


def refuse_mixed(prepared: Sequence[np.ndarray | Tensor]) -> None:
    """A batch is of one size, and has a picture."""
    shapes = sorted({tuple(one.shape) for one in prepared})
    if len(shapes) != 1:
        found = " and ".join(str(list(shape)) for shape in shapes[:2]) or "none at all"
        raise InputError(f"pictures of one batch must come out in one size; these are {found}")


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """What pillow cannot read is said in a line."""
    from PIL import UnidentifiedImageError

    try:
        yield
    except UnidentifiedImageError:
        raise InputError(f"{name}: not a picture; give a JPEG, PNG or another file that pillow reads") from None
    except Exception as error:  # pillow's readers raise whatever a broken file makes them stumble over
        if isinstance(error, OSError) and error.errno is not None:
            raise InputError(f"{name}: cannot be read ({error.strerror})") from None
        raise InputError(f"{name}: a broken picture ({' '.join(str(error).split())})") from None


def _bytes(array: np.ndarray) -> np.ndarray:
    """[H, W], [H, W, C] or [C, H, W] as pillow takes it."""
    if array.ndim == 3 and array.shape[0] in _CHANNELS:
        array = array.transpose(1, 2, 0)
    if not array.size or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[-1] not in _CHANNELS):
        raise InputError(f"an array of {list(array.shape)} is no picture: give [H, W], [H, W, C] or [C, H, W]")
    if not np.issubdtype(array.dtype, np.integer) or array.min() < 0 or array.max() > 255:
        raise InputError(f"an array of {array.dtype} is no picture: give whole numbers from 0 to 255")
    array = array[..., 0] if array.shape[2:] == (1,) else array
    return np.ascontiguousarray(array, dtype=np.uint8)


def _on_white(image: Image) -> Image:
    from PIL import Image as pillow

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = pillow.new("RGBA", image.size, (255, 255, 255, 255))
    return pillow.alpha_composite(white, image.convert("RGBA")).convert("RGB")


# ---- the preprocessor file ------------------------------------------------------------------------------------------


def _fields(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Our fields out of their options; one that is null says nothing."""
    said = {key: value for key, value in raw.items() if value is not None}
    for key, value in said.items():
        if key not in _KNOWN and value is not False:
            raise InputError(f"{where}: {key} is {value!r}, and qkv has no such option; pictures would come out wrong")
    kinds = [said[key] for key in ("image_processor_type", "feature_extractor_type") if key in said]
    for key, good in {"data_format": ("channels_first",), "resample": _FILTERS}.items():
        if key in said and (isinstance(said[key], bool) or said[key] not in good):
            raise InputError(f"{where}: {key} cannot be {said[key]!r}; it is one of {', '.join(map(str, good))}")
    for kind in kinds:
        if kind not in _KINDS:
            raise InputError(f"{where}: prepares pictures as {kind} does; qkv has {_KINDS[0]} only")
    made = {"rgb": _switch(said, "do_convert_rgb", False, where), "resample": said.get("resample", Images.resample)}
    made["kind"] = kinds[0] if kinds else Images.kind
    made["size"] = _size(said, where) if _switch(said, "do_resize", True, where) else None
    made["crop"] = _sides(said, "crop_size", None, where) if _switch(said, "do_center_crop", False, where) else None
    made["factor"] = None
    if _switch(said, "do_rescale", True, where):
        (made["factor"],) = _numbers([said.get("rescale_factor", Images.factor)], "rescale_factor", where)
    made["mean"] = made["deviation"] = None
    if _switch(said, "do_normalize", True, where):
        made["mean"] = _numbers(said.get("image_mean", Images.mean), "image_mean", where)
        made["deviation"] = _numbers(said.get("image_std", Images.deviation), "image_std", where)
        if len(made["mean"]) != len(made["deviation"]) or 0 in made["deviation"]:
            raise InputError(f"{where}: image_std needs as many numbers as image_mean, and none that is 0")
    return made


def _switch(said: dict[str, Any], key: str, default: bool, where: str) -> bool:
    value = said.get(key, default)
    if not isinstance(value, bool):
        raise InputError(f"{where}: {key} cannot be {value!r}; it is true or false")
    return value


def _size(said: dict[str, Any], where: str) -> tuple[int, int] | int:
    size = said.get("size", Images.size)
    if isinstance(size, dict) and set(size) == {"shortest_edge"}:
        return _side(size["shortest_edge"], "size", where)
    if not isinstance(size, int) or _switch(said, "default_to_square", True, where):
        return _sides(said, "size", Images.size, where)
    return _side(size, "size", where)


def _sides(said: dict[str, Any], key: str, default: tuple[int, int] | int | None, where: str) -> tuple[int, int]:
    """Height and width, or one number for both."""
    size = said.get(key, default)
    if isinstance(size, dict) and set(size) == {"height", "width"}:
        size = size["height"], size["width"]
    height, width = size if isinstance(size, tuple) else (size, size)
    return _side(height, key, where), _side(width, key, where)


def _side(value: Any, key: str, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{where}: {key} cannot be {value!r}; qkv takes pixels, or height and width, or shortest_edge")
    return value


def _numbers(values: Any, key: str, where: str) -> tuple[float, ...]:
    listed = list(values) if isinstance(values, list | tuple) else []
    fit = all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in listed)
    if not listed or not fit:
        raise InputError(f"{where}: {key} cannot be {values!r}; it is numbers, one a channel")
    return tuple(float(value) for value in listed)
