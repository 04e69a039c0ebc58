"""Image classification: one label per image (Dosovitskiy et al. 2021, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qkv import spec
from qkv.checkpoints import ModelBundle
from qkv.checkpoints.state import AnyModel
from qkv.data.augmentation import Augmentation
from qkv.data.examples import ImageExample, Pixels
from qkv.data.image_processor import ImageProcessor, check_same_shape
from qkv.data.rng import CounterRNG
from qkv.errors import InputError
from qkv.nn import BatchLayout, Ragged
from qkv.objectives.classification import Inputs
from qkv.tasks.base import check_not_empty
from qkv.tasks.features import Features
from qkv.tasks.head_outputs import check_modality
from qkv.tasks.text_classification import SingleLabel, label_tensor

ChannelValues = float | Sequence[float] | None


class ImageInput(NamedTuple):
    """An image and the processor that prepares it for the model."""

    example: ImageExample
    image_processor: ImageProcessor


@dataclass(frozen=True, kw_only=True)
class ImageClassification(SingleLabel[ImageExample]):
    """One label per image."""

    mean: ChannelValues = None
    """Mean that normalization subtracts from pixels in [0, 1]: one number, or one per channel.
    None: the pretrained model's, or 0.5."""

    std: ChannelValues = None
    """Standard deviation that normalization divides by: one number, or one per channel.
    None: the pretrained model's, or 0.5."""

    horizontal_flip: bool = False
    """Mirror each training image with probability 1/2."""

    max_shift: int = 0
    """Shift each training image by up to this many pixels in both directions."""

    random_erasing: float = 0.0
    """Probability that a rectangle of a training image is erased."""

    name = "image_classification"
    example_type = ImageExample
    modality = "image"

    def __post_init__(self) -> None:
        _ = self.augmentation  # validates its settings

    def parse_line(self, line: str, location: str) -> ImageExample:
        return self.parse_texts([line], location)  # a file name may contain a tab

    def parse_input(self, value: Any, location: str) -> ImageExample:
        """Make an example of a file name, a Pillow image, an array [H, W] or [H, W, C], or an example."""
        if hasattr(value, "__array_interface__") and not isinstance(value, str | bytes):
            return ImageExample(np.asarray(value), location)
        return super().parse_input(value, location)

    def parse_texts(self, texts: Sequence[str], location: str) -> ImageExample:
        if len(texts) != 1:
            raise InputError(f"{location}: this model takes one image file, not {len(texts)}")
        check_not_empty(texts, location)
        return ImageExample(Path(texts[0]), location)

    @property
    def augmentation(self) -> Augmentation:
        return Augmentation(
            horizontal_flip=self.horizontal_flip, max_shift=self.max_shift, random_erasing=self.random_erasing
        )

    def training_processor(self, bundle: ModelBundle) -> ImageProcessor:
        check_modality(self, bundle.model.spec)
        assert isinstance(bundle.model.spec.source_embedding, spec.PatchEmbedding)  # an image model
        return self.make_image_processor(bundle.model.spec.source_embedding, bundle.image_processor)

    def make_bundle(self, model: AnyModel, processor: ImageProcessor) -> ModelBundle:
        return ModelBundle(model, image_processor=processor)

    def content_hash(self, feature: Features) -> bytes:
        content_hash: bytes = feature.metadata.example.content_hash()
        return content_hash

    def make_image_processor(self, s: spec.PatchEmbedding, loaded_processor: ImageProcessor | None) -> ImageProcessor:
        """Return the image processor: the pretrained model's, or a new one for the model's image size and channels."""
        if self.max_shift >= s.image_size:
            size = f"an image of {s.image_size} pixels"
            raise InputError(f"task.max_shift: {self.max_shift} pixels shift {size} out of view; give fewer")
        half = (0.5,) * s.num_channels
        processor = loaded_processor or ImageProcessor(
            convert_rgb=s.num_channels == 3, size=(s.image_size, s.image_size), mean=half, std=half
        )
        settings = {"mean": self.mean, "std": self.std}
        overrides: dict[str, Any] = {
            key: _per_channel(key, value, s.num_channels) for key, value in settings.items() if value is not None
        }
        processor = replace(processor, raw_config=None, **overrides) if overrides else processor
        if (processor.mean is None) != (processor.std is None):
            raise InputError("task.mean and task.std: this model has neither; set both")
        return processor

    def featurize(
        self, examples: Sequence[ImageExample], image_processor: ImageProcessor, labels: Sequence[str], max_length: int
    ) -> list[Features]:
        """Return one feature per image with one placeholder id per patch; `collate` opens the image."""
        labeled_examples = zip(examples, self.label_ids(examples, labels), strict=True)
        placeholder_ids = (range(max_length),)
        return [
            Features(i, placeholder_ids, (), label, metadata=ImageInput(example, image_processor))
            for i, (example, label) in enumerate(labeled_examples)
        ]

    def collate(self, features: Sequence[Features], use_token_types: bool) -> Inputs:  # noqa: ARG002
        return self._make_inputs(features, _load_pixels(features))

    def collate_training(self, features: Sequence[Features], use_token_types: bool, rng: CounterRNG) -> Inputs:  # noqa: ARG002
        """Augment the images at random and pack them into one training batch."""
        image_processor = features[0].metadata.image_processor
        mean = image_processor.mean or (0.0,)
        factor = 1.0 if image_processor.rescale_factor is None else image_processor.rescale_factor
        fill = np.array([round(channel_mean / factor) for channel_mean in mean]).clip(0, 255).astype(np.uint8)
        example_indices = np.array([feature.example_index for feature in features], dtype=np.int64)
        return self._make_inputs(features, self.augmentation(_load_pixels(features), rng, example_indices, fill))

    def _make_inputs(self, features: Sequence[Features], pixels: Pixels) -> Inputs:
        # the layout of the patches is part of the batch, so that it is copied to the device with it
        layout = BatchLayout([features[0].length] * len(features))
        source = Ragged(features[0].metadata.image_processor.normalize(pixels), layout)  # [B, C, H, W]
        return Inputs(source, None, None, label_tensor(features))


def _load_pixels(features: Sequence[Features]) -> Pixels:
    """Return the images in the model's size and color mode.  # [B, H, W, C]"""
    image_processor, image_list = (
        features[0].metadata.image_processor,
        [item.metadata.example.image for item in features],
    )
    if (
        image_processor.is_preprocessed(image_list[0])
        and len({getattr(item, "shape", None) for item in image_list}) == 1
    ):
        return np.stack(image_list).reshape(len(image_list), *image_list[0].shape[:2], -1)
    pixel_arrays = [image_processor.to_pixels(item) for item in image_list]
    check_same_shape(pixel_arrays)
    return np.stack(pixel_arrays)


def _per_channel(field: str, value: Any, channels: int) -> tuple[float, ...]:
    numbers = list(value) if isinstance(value, list | tuple) else [value] * channels
    is_valid = all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)
    if not is_valid or len(numbers) != channels or (field == "std" and min(numbers) <= 0):
        hint = ", each above 0" if field == "std" else ""
        raise InputError(f"task.{field}: {value!r} is not a number, or {channels} of them, one per channel{hint}")
    return tuple(float(number) for number in numbers)
