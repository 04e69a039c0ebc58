"""Image preprocessing for vision models, configured by the checkpoint's preprocessor_config.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qkv.data.image_files import AnyArray, ImageLike, image_name, open_image
from qkv.errors import InputError, quote
from qkv.files import atomic_write_bytes, parse_json, read_file
from qkv.limits import limit, raise_hint

if TYPE_CHECKING:  # Pillow is imported when the first image is read
    from PIL.Image import Image

PREPROCESSOR = "preprocessor_config.json"

_PROCESSOR_TYPES = ("ViTImageProcessor", "ViTImageProcessorFast", "ViTFeatureExtractor")
_RESAMPLE_FILTERS = range(6)  # Pillow's: nearest, lanczos, bilinear, bicubic, box, hamming
_KNOWN_OPTIONS = {
    "image_processor_type",
    "feature_extractor_type",
    "do_convert_rgb",
    "do_resize",
    "size",
    "default_to_square",
}
_KNOWN_OPTIONS |= {"resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor"}
_KNOWN_OPTIONS |= {"do_normalize", "image_mean", "image_std", "data_format"}
_KNOWN_OPTIONS |= {
    "processor_class",
    "_valid_processor_keys",
    "device",
    "return_tensors",
    "disable_grouping",
    "pad_size",
}
_MAX_NUMBER = 1e30  # of means, deviations and factors, so that single precision can hold them and their inverses
_MAX_CHANNELS = 4
_BYTE_MODES = ("L", "RGB", "RGBA")  # one byte per channel, so that the array has the displayed values


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """Preprocessing steps, in the order in which they are applied. The defaults are those of an empty file."""

    convert_rgb: bool = False
    """Convert to RGB, with transparent images on a white background."""
    size: tuple[int, int] | int | None = (224, 224)
    """Resize to this height and width, or the shorter side to this length; None keeps the size."""
    resample: int = 2
    """Pillow's number of the resampling filter; 2 is bilinear."""
    crop_size: tuple[int, int] | None = None
    """Height and width of a center crop; black outside the image. None does not crop."""
    rescale_factor: float | None = 1 / 255
    """Factor by which pixel values are multiplied; None keeps them."""
    mean: tuple[float, ...] | None = (0.5, 0.5, 0.5)
    """Mean of each channel, which is subtracted; None does not normalize."""
    std: tuple[float, ...] | None = (0.5, 0.5, 0.5)
    """Standard deviation of each channel, by which values are divided after the mean is subtracted."""
    processor_type: str = _PROCESSOR_TYPES[0]
    """Class name of the processor in the configuration file."""
    raw_config: bytes | None = field(default=None, repr=False, compare=False)
    """Content of the configuration file it was loaded from, which `save` writes back unchanged."""

    @classmethod
    def load(cls, path: Path) -> ImageProcessor:
        """Load a preprocessor_config.json. Options that would change the pixels in an unsupported way are refused."""
        raw_config = read_file(path)
        options = parse_json(raw_config, str(path))
        if not isinstance(options, dict):
            raise InputError(f"{path}: not a JSON object; restore it from the original checkpoint")
        return cls(**_parse_hf_config(options, str(path)), raw_config=raw_config)

    def save(self, path: Path) -> None:
        """Write the configuration file: the one it was loaded from, byte for byte, or a new one."""
        new_config = (json.dumps(self._to_hf_config(), indent=2) + "\n").encode()
        atomic_write_bytes(path, new_config if self.raw_config is None else self.raw_config)

    def _to_hf_config(self) -> dict[str, Any]:
        def size_dict(size: tuple[int, int]) -> dict[str, int]:
            return {"height": size[0], "width": size[1]}

        options: dict[str, Any] = {"image_processor_type": self.processor_type, "do_convert_rgb": self.convert_rgb}
        options |= {"do_resize": self.size is not None, "resample": self.resample}
        if self.size is not None:
            options["size"] = {"shortest_edge": self.size} if isinstance(self.size, int) else size_dict(self.size)
        options |= {"do_center_crop": self.crop_size is not None} | (
            {"crop_size": size_dict(self.crop_size)} if self.crop_size else {}
        )
        options |= {"do_rescale": self.rescale_factor is not None} | (
            {"rescale_factor": self.rescale_factor} if self.rescale_factor else {}
        )
        options["do_normalize"] = self.mean is not None and self.std is not None
        if options["do_normalize"]:
            options |= {"image_mean": list(self.mean or ()), "image_std": list(self.std or ())}
        return options

    def preprocess(self, raw_image: ImageLike) -> Tensor:
        """Return a file, a Pillow image or an integer array as the model's input.  # [C, H, W]"""
        values = self._normalize_array(self.to_pixels(raw_image))  # [H, W, C]
        return torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1)))

    def to_pixels(self, raw_image: ImageLike) -> AnyArray:
        """Return the image resized, cropped and converted, with one byte per channel.  # [H, W, C]"""
        if self.is_preprocessed(raw_image):
            return raw_image.reshape(*raw_image.shape[:2], -1)
        name = image_name(raw_image)
        image = self._resize_and_crop(self._convert_mode(open_image(raw_image, name)))
        pixels = np.asarray(image).reshape(image.height, image.width, -1)  # [H, W, C]
        if self.mean is not None and len(self.mean) != pixels.shape[-1]:
            expected = f"{PREPROCESSOR} has means for {len(self.mean)}"
            raise InputError(f"{name}: has {pixels.shape[-1]} channels and {expected}; convert it first")
        return pixels

    def is_preprocessed(self, raw_image: ImageLike) -> TypeGuard[npt.NDArray[np.uint8]]:
        """Return whether this is an array that already has the final size and channels; then Pillow is skipped."""
        if not isinstance(raw_image, np.ndarray) or raw_image.dtype != np.uint8 or raw_image.ndim not in (2, 3):
            return False
        channels = 1 if raw_image.ndim == 2 else raw_image.shape[-1]
        has_channels = self.mean is not None and channels == len(self.mean) == (3 if self.convert_rgb else channels)
        return has_channels and raw_image.shape[:2] == self.size == (self.crop_size or self.size)

    def normalize(self, pixels: AnyArray) -> Tensor:
        """Rescale and normalize a batch of pixels exactly as `preprocess` does.  # [B, H, W, C] -> [B, C, H, W]"""
        channels = pixels.shape[-1]
        values = self._normalize_array(np.repeat(np.arange(256, dtype=np.uint8)[:, None], channels, 1))  # [256, C]
        normalized = np.empty((len(pixels), channels, *pixels.shape[1:3]), np.float32)
        for channel in range(channels):
            # a byte is never out of range; mode="clip" skips the bounds check, which would dominate the run time
            np.take(values[:, channel], pixels[..., channel], out=normalized[:, channel], mode="clip")
        return torch.from_numpy(normalized)

    def preprocess_batch(self, raw_images: Iterable[ImageLike]) -> Tensor:
        """Preprocess images that have one size afterwards.  # [B, C, H, W]"""
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
            _check_pixels(self.size * longer, "the image", f"{image.width:,} × {image.height:,} pixels")
            size = (self.size, longer) if image.width <= image.height else (longer, self.size)
            image = image.resize(size, resample=self.resample)
        elif self.size is not None:
            image = image.resize((self.size[1], self.size[0]), resample=self.resample)  # Pillow takes (width, height)
        if self.crop_size is not None:
            left, top = (image.width - self.crop_size[1]) // 2, (image.height - self.crop_size[0]) // 2
            image = image.crop((left, top, left + self.crop_size[1], top + self.crop_size[0]))
        return image

    def _normalize_array(self, pixels: AnyArray) -> AnyArray:
        """Rescale and normalize; rounds to single precision after rescaling, as `transformers` does."""
        rescale_factor = 1.0 if self.rescale_factor is None else self.rescale_factor
        values = (pixels * np.float64(rescale_factor)).astype(np.float32)  # [H, W, C]
        if self.mean is None or self.std is None:
            return values
        return (values - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)


def check_same_shape(images: Sequence[AnyArray | Tensor]) -> None:
    """Check that a batch is not empty and all its images have one shape."""
    shapes = sorted({tuple(image.shape) for image in images})
    if len(shapes) != 1:
        listed_shapes = " and ".join(str(list(shape)) for shape in shapes[:2]) or "an empty batch"
        raise InputError(f"the images of a batch must have one shape after preprocessing, not {listed_shapes}")


def _composite_on_white(image: Image) -> Image:
    from PIL import Image as pillow

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = pillow.new("RGBA", image.size, (255, 255, 255, 255))
    return pillow.alpha_composite(white, image.convert("RGBA")).convert("RGB")


# ---- preprocessor_config.json ----------------------------------------------------------------------------------------


def _parse_hf_config(raw: dict[str, Any], location: str) -> dict[str, Any]:
    """Return the fields of `ImageProcessor` for the options of a file; an option that is null counts as absent."""
    options = {key: value for key, value in raw.items() if value is not None}
    for key, value in options.items():
        if key not in _KNOWN_OPTIONS and value is not False:
            raise InputError(f"{location}: {quote(key)} is {quote(value)}, an option that qkv does not support")
    processor_types = [options[key] for key in ("image_processor_type", "feature_extractor_type") if key in options]
    for key, allowed in {"data_format": ("channels_first",), "resample": _RESAMPLE_FILTERS}.items():
        # 2.0 and True are equal to whole numbers, but Pillow takes neither
        if key in options and (type(options[key]) not in (str, int) or options[key] not in allowed):
            raise InputError(
                f"{location}: {key} cannot be {quote(options[key])}; it is one of {', '.join(map(str, allowed))}"
            )
    for processor_type in processor_types:
        if processor_type not in _PROCESSOR_TYPES:
            raise InputError(
                f"{location}: the processor {quote(processor_type)} is not supported; qkv has {_PROCESSOR_TYPES[0]}"
            )
    fields = {
        "convert_rgb": _bool_option(options, "do_convert_rgb", False, location),
        "resample": options.get("resample", ImageProcessor.resample),
    }
    fields["processor_type"] = processor_types[0] if processor_types else ImageProcessor.processor_type
    fields["size"] = _parse_size(options, location) if _bool_option(options, "do_resize", True, location) else None
    fields["crop_size"] = (
        _parse_height_width(options, "crop_size", None, location)
        if _bool_option(options, "do_center_crop", False, location)
        else None
    )
    fields["rescale_factor"] = None
    if _bool_option(options, "do_rescale", True, location):
        (fields["rescale_factor"],) = _parse_floats(
            [options.get("rescale_factor", ImageProcessor.rescale_factor)], "rescale_factor", location
        )
    fields["mean"] = fields["std"] = None
    if _bool_option(options, "do_normalize", True, location):
        fields["mean"] = _parse_floats(options.get("image_mean", ImageProcessor.mean), "image_mean", location)
        fields["std"] = _parse_floats(options.get("image_std", ImageProcessor.std), "image_std", location)
        if len(fields["mean"]) != len(fields["std"]) or any(abs(std) < 1 / _MAX_NUMBER for std in fields["std"]):
            raise InputError(f"{location}: image_std needs as many numbers as image_mean, none of them 0")
    return fields


def _bool_option(options: dict[str, Any], key: str, default: bool, location: str) -> bool:
    value = options.get(key, default)
    if not isinstance(value, bool):
        raise InputError(f"{location}: {key} cannot be {quote(value)}; it is true or false")
    return value


def _parse_size(options: dict[str, Any], location: str) -> tuple[int, int] | int:
    size = options.get("size", ImageProcessor.size)
    if isinstance(size, dict) and set(size) == {"shortest_edge"}:
        return _check_shortest_edge(size["shortest_edge"], location)
    if not isinstance(size, int) or _bool_option(options, "default_to_square", True, location):
        return _parse_height_width(options, "size", ImageProcessor.size, location)
    return _check_shortest_edge(size, location)


def _check_shortest_edge(value: Any, location: str) -> int:
    side = _check_side(value, "size", location)
    _check_pixels(side * side, location, f"with size {quote(side, 20)}, an image")
    return side


def _parse_height_width(
    options: dict[str, Any], key: str, default: tuple[int, int] | int | None, location: str
) -> tuple[int, int]:
    """Parse a height and width, or one number for both."""
    size = options.get(key, default)
    if isinstance(size, dict) and set(size) == {"height", "width"}:
        size = size["height"], size["width"]
    height, width = size if isinstance(size, tuple) else (size, size)
    height, width = _check_side(height, key, location), _check_side(width, key, location)
    _check_pixels(height * width, location, f"with {key} {quote(height, 20)} × {quote(width, 20)}, an image")
    return height, width


def _check_side(value: Any, key: str, location: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(
            f"{location}: {key} cannot be {quote(value)}; give a number of pixels, height and width, or shortest_edge"
        )
    return value


def _check_pixels(num_pixels: int, location: str, size: str) -> None:
    if num_pixels > limit("resized_pixels"):
        raise InputError(f"{location}: {size} would be resized to too many pixels; {raise_hint('resized_pixels')}")


def _parse_floats(values: Any, key: str, location: str) -> tuple[float, ...]:
    items = list(values) if isinstance(values, list | tuple) else []
    # an integer can be too large to be compared after a conversion, and a NaN compares false
    is_valid = all(isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < _MAX_NUMBER for v in items)
    if not items or not is_valid or len(items) > _MAX_CHANNELS:
        raise InputError(f"{location}: {key} cannot be {quote(values)}; give one number per channel")
    return tuple(float(value) for value in items)
