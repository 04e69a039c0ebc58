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
from qkv.files import atomic_write_bytes

if TYPE_CHECKING:  # pillow is loaded when a picture is read
    from PIL.Image import Image

PREPROCESSOR = "preprocessor_config.json"

ImageLike: TypeAlias = "str | Path | Image | np.ndarray | Tensor"

_PROCESSOR_TYPES = ("ViTImageProcessor", "ViTImageProcessorFast", "ViTFeatureExtractor")
_RESAMPLE_FILTERS = range(6)  # pillow's: nearest, lanczos, bilinear, bicubic, box, hamming
_KNOWN_OPTIONS = {"image_processor_type", "feature_extractor_type", "do_convert_rgb", "do_resize", "size", "default_to_square"}
_KNOWN_OPTIONS |= {"resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor"}
_KNOWN_OPTIONS |= {"do_normalize", "image_mean", "image_std", "data_format"}
_KNOWN_OPTIONS |= {"processor_class", "_valid_processor_keys", "device", "return_tensors", "disable_grouping", "pad_size"}
_CHANNEL_COUNTS = (1, 3, 4)
_BYTE_MODES = ("L", "RGB", "RGBA")  # one byte a channel, so that an array of it means what it shows


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """What is done to a picture, in this order; the defaults are those of a file that says nothing."""

    convert_rgb: bool = False  # what is transparent is laid on white, and all becomes red, green and blue
    size: tuple[int, int] | int | None = (224, 224)  # height and width; one number: the shorter side's; None: as it is
    resample: int = 2
    crop_size: tuple[int, int] | None = None  # height and width out of the middle; black where the picture ends
    rescale_factor: float | None = 1 / 255
    mean: tuple[float, ...] | None = (0.5, 0.5, 0.5)  # a channel each, taken away; then divided by `std`
    std: tuple[float, ...] | None = (0.5, 0.5, 0.5)
    processor_type: str = _PROCESSOR_TYPES[0]
    raw_config: bytes | None = field(default=None, repr=False, compare=False)  # the file that it was read from

    @classmethod
    def load(cls, path: Path) -> ImageProcessor:
        """Out of a preprocessor file; what would change the pixels in a way that we do not know is refused by name."""
        try:
            raw_config = path.read_bytes()
            options = json.loads(raw_config)
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from None
        except ValueError:
            raise InputError(f"{path}: not JSON; restore it from where the checkpoint came from") from None
        if not isinstance(options, dict):
            raise InputError(f"{path}: holds no JSON object; restore it from where the checkpoint came from")
        return cls(**_parse_hf_config(options, str(path)), raw_config=raw_config)

    def save(self, path: Path) -> None:
        """Writes the file that was read, byte for byte; where there was none, one that says the same."""
        new_config = (json.dumps(self._to_hf_config(), indent=2) + "\n").encode()
        atomic_write_bytes(path, new_config if self.raw_config is None else self.raw_config)

    def _to_hf_config(self) -> dict[str, Any]:
        def size_dict(size: tuple[int, int]) -> dict[str, int]:
            return {"height": size[0], "width": size[1]}

        options: dict[str, Any] = {"image_processor_type": self.processor_type, "do_convert_rgb": self.convert_rgb}
        options |= {"do_resize": self.size is not None, "resample": self.resample}
        if self.size is not None:
            options["size"] = {"shortest_edge": self.size} if isinstance(self.size, int) else size_dict(self.size)
        options |= {"do_center_crop": self.crop_size is not None} | ({"crop_size": size_dict(self.crop_size)} if self.crop_size else {})
        options |= {"do_rescale": self.rescale_factor is not None} | ({"rescale_factor": self.rescale_factor} if self.rescale_factor else {})
        options["do_normalize"] = self.mean is not None and self.std is not None
        if options["do_normalize"]:
            options |= {"image_mean": list(self.mean or ()), "image_std": list(self.std or ())}
        return options

    def preprocess(self, raw_image: ImageLike) -> Tensor:
        """A file, a pillow image or an array of bytes as the model wants it.  # [C, H, W]"""
        return torch.from_numpy(np.ascontiguousarray(self._normalize_array(self.to_pixels(raw_image)).transpose(2, 0, 1)))

    def to_pixels(self, raw_image: ImageLike) -> np.ndarray:
        """The same in its size and colours, still in bytes.  # [H, W, C]"""
        if self.is_preprocessed(raw_image):
            return raw_image.reshape(*raw_image.shape[:2], -1)
        name = str(raw_image) if isinstance(raw_image, str | Path) else "the picture"
        image = self._resize_and_crop(self._convert_mode(_open_image(raw_image, name)))
        pixels = np.asarray(image).reshape(image.height, image.width, -1)  # [H, W, C]
        if self.mean is not None and len(self.mean) != pixels.shape[-1]:
            expected = f"{PREPROCESSOR} has means for {len(self.mean)}"
            raise InputError(f"{name}: has {pixels.shape[-1]} channels and {expected}; convert it first")
        return pixels

    def is_preprocessed(self, raw_image: ImageLike) -> TypeGuard[np.ndarray]:
        """Whether it is an array as it should be, so that pillow, which takes its time, has nothing to do."""
        if not isinstance(raw_image, np.ndarray) or raw_image.dtype != np.uint8 or raw_image.ndim not in (2, 3):
            return False
        channels = 1 if raw_image.ndim == 2 else raw_image.shape[-1]
        has_channels = self.mean is not None and channels == len(self.mean) == (3 if self.convert_rgb else channels)
        return has_channels and raw_image.shape[:2] == self.size == (self.crop_size or self.size)

    def normalize(self, pixels: np.ndarray) -> Tensor:
        """Pixels of one size as numbers, each what `preprocess` makes of it.  # [B, H, W, C] -> [B, C, H, W]"""
        channels = pixels.shape[-1]
        values = self._normalize_array(np.repeat(np.arange(256, dtype=np.uint8)[:, None], channels, 1))  # [256, C]
        normalized = np.empty((len(pixels), channels, *pixels.shape[1:3]), np.float32)
        for channel in range(channels):
            # a byte is never outside, and to look that up first would take longer than the rest
            np.take(values[:, channel], pixels[..., channel], out=normalized[:, channel], mode="clip")
        return torch.from_numpy(normalized)

    def preprocess_batch(self, raw_images: Iterable[ImageLike]) -> Tensor:
        """Several pictures of one size.  # [B, C, H, W]"""
        tensors = [self.preprocess(raw_image) for raw_image in raw_images]
        check_same_shape(tensors)
        return torch.stack(tensors)

    def _convert_mode(self, image: Image) -> Image:
        if self.convert_rgb:
            return _composite_on_white(image)
        num_channels = None if self.mean is None else len(self.mean)
        if image.mode in _BYTE_MODES and num_channels in (None, len(image.getbands())):
            return image
        return image.convert("L" if num_channels == 1 else "RGB")

    def _resize_and_crop(self, image: Image) -> Image:
        if isinstance(self.size, int):
            longer = int(self.size * max(image.size) / min(image.size))
            size = (self.size, longer) if image.width <= image.height else (longer, self.size)
            image = image.resize(size, resample=self.resample)
        elif self.size is not None:
            image = image.resize((self.size[1], self.size[0]), resample=self.resample)  # pillow says width first
        if self.crop_size is not None:
            left, top = (image.width - self.crop_size[1]) // 2, (image.height - self.crop_size[0]) // 2
            image = image.crop((left, top, left + self.crop_size[1], top + self.crop_size[0]))
        return image

    def _normalize_array(self, pixels: np.ndarray) -> np.ndarray:
        """Rounded to single precision where theirs is: behind the factor."""
        rescale_factor = 1.0 if self.rescale_factor is None else self.rescale_factor
        values = (pixels * np.float64(rescale_factor)).astype(np.float32)  # [H, W, C]
        if self.mean is None or self.std is None:
            return values
        return (values - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)


def _open_image(raw_image: ImageLike, name: str) -> Image:
    from PIL import Image, ImageOps

    if isinstance(raw_image, np.ndarray | Tensor):
        return Image.fromarray(_to_uint8_array(np.asarray(raw_image)))
    with _wrap_pillow_errors(name):
        if isinstance(raw_image, Image.Image):
            raw_image.load()  # only now is the file behind it read
            image = raw_image
        else:
            with Image.open(raw_image) as file:
                image = ImageOps.exif_transpose(file)
    if 0 in image.size:
        raise InputError(f"{name}: has no pixels")
    image = _to_8_bit(image, name)
    return image if isinstance(raw_image, Image.Image) else image.convert("RGB")  # as theirs: transparency is dropped


def _to_8_bit(image: Image, name: str) -> Image:
    """Of 16 bits a pixel the upper 8; pillow itself would make white of all that is not nearly black."""
    from PIL import Image as pillow

    _check_bit_depth(image, name)
    if not image.mode.startswith("I;16"):
        return image
    return pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8))


def _check_bit_depth(image: Image, name: str) -> None:
    if image.mode in ("I", "F"):
        raise InputError(f"{name}: has 32 bits a pixel, and nothing says what is white; save it with 8 or 16")


def verify_image(path: Path) -> None:
    """Refuses a file that `ImageProcessor.preprocess` would refuse, in as little time as that takes."""
    from PIL import Image

    with _wrap_pillow_errors(str(path)), Image.open(path) as file:
        file.draft("L", (1, 1))  # of a JPEG all is read, and an eighth of it worked out
        file.load()
    _check_bit_depth(file, str(path))


def thumbnail_png(raw_image: ImageLike, max_side: int) -> bytes:
    """A picture, made smaller where its longer side has more pixels, for a page."""
    image = _open_image(raw_image, str(raw_image) if isinstance(raw_image, str | Path) else "the picture").copy()
    image.thumbnail((max_side, max_side))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def check_same_shape(images: Sequence[np.ndarray | Tensor]) -> None:
    """A batch is of one size, and has a picture."""
    shapes = sorted({tuple(image.shape) for image in images})
    if len(shapes) != 1:
        listed_shapes = " and ".join(str(list(shape)) for shape in shapes[:2]) or "none at all"
        raise InputError(f"pictures of one batch must come out in one size; these are {listed_shapes}")


@contextmanager
def _wrap_pillow_errors(name: str) -> Iterator[None]:
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


def _to_uint8_array(array: np.ndarray) -> np.ndarray:
    """[H, W], [H, W, C] or [C, H, W] as pillow takes it."""
    if array.ndim == 3 and array.shape[0] in _CHANNEL_COUNTS:
        array = array.transpose(1, 2, 0)
    if not array.size or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[-1] not in _CHANNEL_COUNTS):
        raise InputError(f"an array of {list(array.shape)} is no picture: give [H, W], [H, W, C] or [C, H, W]")
    if not np.issubdtype(array.dtype, np.integer) or array.min() < 0 or array.max() > 255:
        raise InputError(f"an array of {array.dtype} is no picture: give whole numbers from 0 to 255")
    array = array[..., 0] if array.shape[2:] == (1,) else array
    return np.ascontiguousarray(array, dtype=np.uint8)


def _composite_on_white(image: Image) -> Image:
    from PIL import Image as pillow

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = pillow.new("RGBA", image.size, (255, 255, 255, 255))
    return pillow.alpha_composite(white, image.convert("RGBA")).convert("RGB")


# ---- the preprocessor file ------------------------------------------------------------------------------------------


def _parse_hf_config(raw: dict[str, Any], location: str) -> dict[str, Any]:
    """Our fields out of their options; one that is null says nothing."""
    options = {key: value for key, value in raw.items() if value is not None}
    for key, value in options.items():
        if key not in _KNOWN_OPTIONS and value is not False:
            raise InputError(f"{location}: {key} is {value!r}, and qkv has no such option; pictures would come out wrong")
    processor_types = [options[key] for key in ("image_processor_type", "feature_extractor_type") if key in options]
    for key, allowed in {"data_format": ("channels_first",), "resample": _RESAMPLE_FILTERS}.items():
        if key in options and (isinstance(options[key], bool) or options[key] not in allowed):
            raise InputError(f"{location}: {key} cannot be {options[key]!r}; it is one of {', '.join(map(str, allowed))}")
    for processor_type in processor_types:
        if processor_type not in _PROCESSOR_TYPES:
            raise InputError(f"{location}: prepares pictures as {processor_type} does; qkv has {_PROCESSOR_TYPES[0]} only")
    fields = {"convert_rgb": _bool_option(options, "do_convert_rgb", False, location), "resample": options.get("resample", ImageProcessor.resample)}
    fields["processor_type"] = processor_types[0] if processor_types else ImageProcessor.processor_type
    fields["size"] = _parse_size(options, location) if _bool_option(options, "do_resize", True, location) else None
    fields["crop_size"] = _parse_height_width(options, "crop_size", None, location) if _bool_option(options, "do_center_crop", False, location) else None
    fields["rescale_factor"] = None
    if _bool_option(options, "do_rescale", True, location):
        (fields["rescale_factor"],) = _parse_floats([options.get("rescale_factor", ImageProcessor.rescale_factor)], "rescale_factor", location)
    fields["mean"] = fields["std"] = None
    if _bool_option(options, "do_normalize", True, location):
        fields["mean"] = _parse_floats(options.get("image_mean", ImageProcessor.mean), "image_mean", location)
        fields["std"] = _parse_floats(options.get("image_std", ImageProcessor.std), "image_std", location)
        if len(fields["mean"]) != len(fields["std"]) or 0 in fields["std"]:
            raise InputError(f"{location}: image_std needs as many numbers as image_mean, and none that is 0")
    return fields


def _bool_option(options: dict[str, Any], key: str, default: bool, location: str) -> bool:
    value = options.get(key, default)
    if not isinstance(value, bool):
        raise InputError(f"{location}: {key} cannot be {value!r}; it is true or false")
    return value


def _parse_size(options: dict[str, Any], location: str) -> tuple[int, int] | int:
    size = options.get("size", ImageProcessor.size)
    if isinstance(size, dict) and set(size) == {"shortest_edge"}:
        return _check_side(size["shortest_edge"], "size", location)
    if not isinstance(size, int) or _bool_option(options, "default_to_square", True, location):
        return _parse_height_width(options, "size", ImageProcessor.size, location)
    return _check_side(size, "size", location)


def _parse_height_width(options: dict[str, Any], key: str, default: tuple[int, int] | int | None, location: str) -> tuple[int, int]:
    """Height and width, or one number for both."""
    size = options.get(key, default)
    if isinstance(size, dict) and set(size) == {"height", "width"}:
        size = size["height"], size["width"]
    height, width = size if isinstance(size, tuple) else (size, size)
    return _check_side(height, key, location), _check_side(width, key, location)


def _check_side(value: Any, key: str, location: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{location}: {key} cannot be {value!r}; qkv takes pixels, or height and width, or shortest_edge")
    return value


def _parse_floats(values: Any, key: str, location: str) -> tuple[float, ...]:
    items = list(values) if isinstance(values, list | tuple) else []
    is_valid = all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in items)
    if not items or not is_valid:
        raise InputError(f"{location}: {key} cannot be {values!r}; it is numbers, one a channel")
    return tuple(float(value) for value in items)
