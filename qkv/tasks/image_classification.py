"""Image classification: one of several labels for a picture (Dosovitskiy et al. 2021, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from qkv import spec
from qkv.data.augmentation import Augmentation
from qkv.data.examples import ImageExample, Pixels
from qkv.data.image_processor import ImageProcessor, check_same_shape
from qkv.data.rng import CounterRNG
from qkv.errors import InputError
from qkv.nn import BatchLayout, Ragged
from qkv.objectives.classification import Inputs
from qkv.tasks.base import Features
from qkv.tasks.text_classification import SingleLabel, label_tensor

ChannelValues = float | Sequence[float] | None


class ImageInput(NamedTuple):
    """A picture, and how the model wants it prepared."""

    example: ImageExample
    image_processor: ImageProcessor

    def content_hash(self) -> bytes:
        """What of it a checkpoint depends on."""
        return self.example.content_hash()


@dataclass(frozen=True, kw_only=True)
class ImageClassification(SingleLabel):
    """See `qkv.tasks.base.Task`."""

    # taken away from pixels between 0 and 1, and what is left is divided by: one number, or one a channel;
    # None: the model's own, of a fresh one 0.5
    mean: ChannelValues = None
    std: ChannelValues = None
    # how what is learned from is varied: see `qkv.data.augmentation`
    horizontal_flip: bool = False
    max_shift: int = 0
    random_erasing: float = 0.0

    name = "image_classification"
    example_type = ImageExample

    def __post_init__(self) -> None:
        _ = self.augmentation  # says what is wrong with its settings

    @property
    def augmentation(self) -> Augmentation:
        return Augmentation(horizontal_flip=self.horizontal_flip, max_shift=self.max_shift, random_erasing=self.random_erasing)

    def make_image_processor(self, s: spec.PatchEmbedding, loaded_processor: ImageProcessor | None) -> ImageProcessor:
        """How a model's pictures are prepared: as it came with it, or to its size and channels."""
        if self.max_shift >= s.image_size:
            raise InputError(f"task.max_shift: {self.max_shift} pixels move a picture of {s.image_size} out of sight; give fewer")
        half = (0.5,) * s.num_channels
        processor = loaded_processor or ImageProcessor(convert_rgb=s.num_channels == 3, size=(s.image_size, s.image_size), mean=half, std=half)
        settings = {"mean": self.mean, "std": self.std}
        overrides: dict[str, Any] = {key: _per_channel(key, value, s.num_channels) for key, value in settings.items() if value is not None}
        processor = replace(processor, raw_config=None, **overrides) if overrides else processor
        if (processor.mean is None) != (processor.std is None):
            raise InputError("task.mean and task.std: this model has neither of its own; give both")
        return processor

    def featurize(self, examples: Sequence[ImageExample], image_processor: ImageProcessor, labels: Sequence[str], max_length: int) -> list[Features]:
        """A picture counts as the tokens that its patches become; it is opened when its turn comes."""
        labeled_examples = zip(examples, self.label_ids(examples, labels), strict=True)
        placeholder_ids = (range(max_length),)
        return [Features(i, placeholder_ids, (), label, metadata=ImageInput(example, image_processor)) for i, (example, label) in enumerate(labeled_examples)]

    def collate(self, features: Sequence[Features], use_token_types: bool) -> Inputs:  # noqa: ARG002  # a picture has none
        return self._make_inputs(features, _load_pixels(features))

    def augment_and_collate(self, features: Sequence[Features], rng: CounterRNG) -> Inputs:
        """The same for training: as the settings say, at random."""
        image_processor = features[0].metadata.image_processor
        mean = image_processor.mean or (0.0,)
        factor = 1.0 if image_processor.rescale_factor is None else image_processor.rescale_factor
        fill = np.array([round(channel_mean / factor) for channel_mean in mean]).clip(0, 255).astype(np.uint8)
        example_indices = np.array([feature.example_index for feature in features], dtype=np.int64)
        return self._make_inputs(features, self.augmentation(_load_pixels(features), rng, example_indices, fill))

    def _make_inputs(self, features: Sequence[Features], pixels: Pixels) -> Inputs:
        # the layout of the tokens that the pictures become goes with them, so that it is ready on the device
        layout = BatchLayout([features[0].length] * len(features))
        source = Ragged(features[0].metadata.image_processor.normalize(pixels), layout)  # [B, C, H, W]
        return Inputs(source, None, None, label_tensor(features))


def _load_pixels(features: Sequence[Features]) -> Pixels:
    """Pictures in the model's size and colours.  # [B, H, W, C]"""
    image_processor, image_list = features[0].metadata.image_processor, [item.metadata.example.image for item in features]
    if image_processor.is_preprocessed(image_list[0]) and len({getattr(item, "shape", None) for item in image_list}) == 1:
        return np.stack(image_list).reshape(len(image_list), *image_list[0].shape[:2], -1)
    pixel_arrays = [image_processor.to_pixels(item) for item in image_list]
    check_same_shape(pixel_arrays)
    return np.stack(pixel_arrays)


def _per_channel(field: str, value: Any, channels: int) -> tuple[float, ...]:
    numbers = list(value) if isinstance(value, list | tuple) else [value] * channels
    is_valid = all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)
    if not is_valid or len(numbers) != channels or (field == "std" and min(numbers) <= 0):
        hint = ", each above 0" if field == "std" else ""
        raise InputError(f"task.{field}: {value!r} is not a number, or {channels} of them, one a channel{hint}")
    return tuple(float(number) for number in numbers)


def make(**settings: Any) -> ImageClassification:
    return ImageClassification(**settings)
