"""Pictures are prepared for a model's size, colours and means; what is scored is never varied."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.append(str(Path(__file__).parent))
from task_models import CASES, labelled, logits_of, looking, model, pictured

from qkv import spec
from qkv.checkpoints import ModelBundle
from qkv.data.examples import ImageExample
from qkv.data.image_processor import ImageProcessor
from qkv.data.rng import CounterRNG
from qkv.errors import InputError
from qkv.tasks import get_task
from qkv.tasks.base import predict

VARIED = {"horizontal_flip": True, "max_shift": 2, "random_erasing": 0.5}
EXAMPLES = [pictured(i) for i in range(12)]
LABELS = ("x", "y", "z")
GREY, COLOUR = (
    spec.PatchEmbedding(image_size=8, patch_size=4, num_channels=channels, d_model=6) for channels in (1, 3)
)


def asked(task: Any, examples: list[ImageExample] = EXAMPLES, images: ImageProcessor | None = None) -> list[Any]:
    return task.featurize(examples, images or task.make_image_processor(GREY, None), LABELS, GREY.max_length)


def test_a_picture_counts_as_its_patches_and_the_one_for_the_whole() -> None:
    assert [one.length for one in asked(get_task("image_classification"))] == [5] * 12


def test_training_varies_a_picture_by_seed_epoch_and_number_and_evaluation_never() -> None:
    task = get_task("image_classification", **VARIED)
    whole = asked(task)
    plain, varied, other = (
        task.collate(whole, False),
        *(task.collate_training(whole, False, CounterRNG(1, n)) for n in (0, 1)),
    )
    assert torch.equal(plain.source.values, get_task("image_classification").collate(whole, False).source.values)
    assert not torch.equal(varied.source.values, plain.source.values)
    assert not torch.equal(varied.source.values, other.source.values)
    part = task.collate_training(whole[3:7], False, CounterRNG(1, 0))
    assert torch.equal(part.source.values, varied.source.values[3:7])
    assert torch.equal(varied.labels, torch.arange(12) % 3)


def test_nothing_is_varied_where_no_setting_asks_for_it() -> None:
    task = get_task("image_classification")
    found, plain = task.collate_training(asked(task), False, CounterRNG(1, 0)), task.collate(asked(task), False)
    assert torch.equal(found.source.values, plain.source.values)


def test_what_is_erased_becomes_the_mean() -> None:
    task = get_task("image_classification", random_erasing=1.0, mean=0.25, std=0.5)
    white = [ImageExample(np.full((8, 8), 255, np.uint8), "w", "x")]
    values = task.collate_training(asked(task, white), False, CounterRNG(1, 0)).source.values
    assert values.unique().tolist() == pytest.approx([0, 1.5], abs=0.005)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("given", ["grey", "colour", "file", "another size"])
def test_every_picture_comes_in_the_models_size_and_colours(channels: int, given: str, tmp_path: Path) -> None:
    task, source = get_task("image_classification"), {1: GREY, 3: COLOUR}[channels]
    size = (8, 8) if given in ("grey", "colour") else (13, 20)
    drawn = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    picture: Any = drawn[..., 0] if given == "grey" else drawn
    if given == "file":
        picture = tmp_path / "a.png"
        Image.fromarray(drawn).save(picture)
    images = task.make_image_processor(source, None)
    values = task.collate(asked(task, [ImageExample(picture, "w")], images), False).source.values
    assert values.shape == (1, channels, 8, 8)
    assert torch.equal(values[0], images.preprocess(Image.fromarray(picture) if given != "file" else picture))


def test_means_are_the_models_own_unless_the_task_says_others() -> None:
    own = ImageProcessor(size=(8, 8), mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), raw_config=b"{}")
    assert get_task("image_classification").make_image_processor(COLOUR, own) is own
    assert get_task("image_classification").make_image_processor(GREY, None) == ImageProcessor(
        size=(8, 8), mean=(0.5,), std=(0.5,)
    )
    said = get_task("image_classification", mean=[0.2, 0.3, 0.4], std=0.25).make_image_processor(COLOUR, own)
    assert (said.mean, said.std, said.raw_config) == ((0.2, 0.3, 0.4), (0.25,) * 3, None)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mean": [0.1, 0.2]}, "task.mean: .* 3 of them, one per channel"),
        ({"mean": "grey"}, "task.mean: 'grey' is not a number"),
        ({"std": 0}, "task.std: 0 is not .* each above 0"),
    ],
)
def test_means_that_make_no_sense_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        get_task("image_classification", **settings).make_image_processor(COLOUR, None)


def test_a_picture_is_not_moved_out_of_sight() -> None:
    size = spec.PatchEmbedding(image_size=8, patch_size=4, num_channels=1, d_model=16)
    with pytest.raises(InputError, match=r"task\.max_shift: 8 pixels shift an image of 8 pixels out of view"):
        get_task("image_classification", max_shift=8).make_image_processor(size, None)  # type: ignore[attr-defined]


def test_a_mean_needs_a_deviation() -> None:
    bare = ImageProcessor(size=(8, 8), mean=None, std=None)
    with pytest.raises(InputError, match="this model has neither; set both"):
        get_task("image_classification", mean=0.5).make_image_processor(COLOUR, bare)
    assert get_task("image_classification", mean=0.5, std=0.2).make_image_processor(COLOUR, bare).mean == (0.5,) * 3


def test_text_is_for_models_that_read_and_pictures_for_those_that_look() -> None:
    task, texts = get_task("image_classification"), get_task("text_classification")
    with pytest.raises(InputError, match="task image_classification: this bert is a text model"):
        predict(task, model(texts, LABELS), EXAMPLES)
    with pytest.raises(InputError, match="task text_classification: this vit is an image model"):
        predict(texts, looking(task, LABELS), [labelled(0, "x")])
    with pytest.raises(InputError, match=r"has no preprocessor_config\.json"):
        predict(task, ModelBundle(looking(task, LABELS).model), EXAMPLES)


def test_pictures_of_one_batch_that_differ_in_size_are_refused() -> None:
    task, images = get_task("image_classification"), ImageProcessor(size=4, mean=(0.5,), std=(0.5,))
    wide = ImageExample(np.zeros((8, 16), np.uint8), "wide")
    with pytest.raises(InputError, match="must have one shape"):
        task.collate(asked(task, [EXAMPLES[0], wide], images), False)


def test_a_file_says_what_its_pixels_say(tmp_path: Path) -> None:
    task = CASES["image_classification"].make()
    bundle = looking(task, LABELS)
    Image.fromarray(EXAMPLES[0].image).save(tmp_path / "a.png")
    named = task.parse_line(str(tmp_path / "a.png"), "here")
    assert torch.equal(*task.collate(asked(task, [named, EXAMPLES[0]]), False).source.values)
    (((_, ours),), ((_, theirs),)) = logits_of(task, bundle, [named, EXAMPLES[0]])
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    (told,) = (one.fields for one in task.predict(bundle, [named], n_best=3))
    assert sum(told["probabilities"].values()) == pytest.approx(1)
    assert (named.to_line(), EXAMPLES[0].to_line()) == (str(tmp_path / "a.png"), "p:0")
