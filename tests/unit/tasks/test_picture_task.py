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
from task_models import CASES, labelled, looking, model, pictured

from qkv import spec
from qkv.data.chance import Chance
from qkv.data.examples import Pictured
from qkv.data.images import Images
from qkv.errors import InputError
from qkv.tasks import find
from qkv.tasks.said import example_of, say, shown
from qkv.tasks.task import logits_of, predict
from qkv.weights import Loaded

VARIED = {"flip": True, "shift": 2, "erase": 0.5}
EXAMPLES = [pictured(i) for i in range(12)]
LABELS = ("x", "y", "z")
GREY, COLOUR = (spec.Patches(image=8, patch=4, channels=channels, width=6) for channels in (1, 3))


def asked(task: Any, examples: list[Pictured] = EXAMPLES, images: Images | None = None) -> list[Any]:
    return task.ask(examples, images or task.images(GREY, None), LABELS, GREY.length)


def test_a_picture_counts_as_its_patches_and_the_one_for_the_whole() -> None:
    assert [one.length for one in asked(find("picture"))] == [5] * 12


def test_training_varies_a_picture_by_seed_epoch_and_number_and_evaluation_never() -> None:
    task = find("picture", **VARIED)
    whole = asked(task)
    plain, varied, other = task.prepare(whole, False), *(task.varied(whole, Chance(1, n)) for n in (0, 1))
    assert torch.equal(plain.source.values, find("picture").prepare(whole, False).source.values)
    assert not torch.equal(varied.source.values, plain.source.values)
    assert not torch.equal(varied.source.values, other.source.values)
    part = task.varied(whole[3:7], Chance(1, 0))
    assert torch.equal(part.source.values, varied.source.values[3:7])
    assert torch.equal(varied.labels, torch.arange(12) % 3)


def test_nothing_is_varied_where_no_setting_asks_for_it() -> None:
    task = find("picture")
    found, plain = task.varied(asked(task), Chance(1, 0)), task.prepare(asked(task), False)
    assert torch.equal(found.source.values, plain.source.values)


def test_what_is_erased_becomes_the_mean() -> None:
    task = find("picture", erase=1.0, mean=0.25, deviation=0.5)
    white = [Pictured(np.full((8, 8), 255, np.uint8), "w", "x")]
    values = task.varied(asked(task, white), Chance(1, 0)).source.values
    assert values.unique().tolist() == pytest.approx([0, 1.5], abs=0.005)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("given", ["grey", "colour", "file", "another size"])
def test_every_picture_comes_in_the_models_size_and_colours(channels: int, given: str, tmp_path: Path) -> None:
    task, source = find("picture"), {1: GREY, 3: COLOUR}[channels]
    size = (8, 8) if given in ("grey", "colour") else (13, 20)
    drawn = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    picture: Any = drawn[..., 0] if given == "grey" else drawn
    if given == "file":
        picture = tmp_path / "a.png"
        Image.fromarray(drawn).save(picture)
    images = task.images(source, None)
    values = task.prepare(asked(task, [Pictured(picture, "w")], images), False).source.values
    assert values.shape == (1, channels, 8, 8)
    assert torch.equal(values[0], images.read(Image.fromarray(picture) if given != "file" else picture))


def test_means_are_the_models_own_unless_the_task_says_others() -> None:
    own = Images(size=(8, 8), mean=(0.1, 0.2, 0.3), deviation=(0.4, 0.5, 0.6), written=b"{}")
    assert find("picture").images(COLOUR, own) is own
    assert find("picture").images(GREY, None) == Images(size=(8, 8), mean=(0.5,), deviation=(0.5,))
    said = find("picture", mean=[0.2, 0.3, 0.4], deviation=0.25).images(COLOUR, own)
    assert (said.mean, said.deviation, said.written) == ((0.2, 0.3, 0.4), (0.25,) * 3, None)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mean": [0.1, 0.2]}, "task.mean: .* 3 of them, one a channel"),
        ({"mean": "grey"}, "task.mean: 'grey' is not a number"),
        ({"deviation": 0}, "task.deviation: 0 is not .* each above 0"),
    ],
)
def test_means_that_make_no_sense_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        find("picture", **settings).images(COLOUR, None)


def test_a_picture_is_not_moved_out_of_sight() -> None:
    size = spec.Patches(image=8, patch=4, channels=1, width=16)
    with pytest.raises(InputError, match=r"task\.shift: 8 pixels move a picture of 8 out of sight"):
        find("picture", shift=8).images(size, None)  # type: ignore[attr-defined]


def test_a_mean_needs_a_deviation() -> None:
    bare = Images(size=(8, 8), mean=None, deviation=None)
    with pytest.raises(InputError, match="neither of its own; give both"):
        find("picture", mean=0.5).images(COLOUR, bare)
    assert find("picture", mean=0.5, deviation=0.2).images(COLOUR, bare).mean == (0.5,) * 3


def test_text_is_for_models_that_read_and_pictures_for_those_that_look() -> None:
    task, texts = find("picture"), find("classify")
    with pytest.raises(InputError, match="task picture: this bert reads text"):
        predict(task, model(texts, LABELS), EXAMPLES)
    with pytest.raises(InputError, match="task classify: this vit looks at pictures"):
        predict(texts, looking(task, LABELS), [labelled(0, "x")])
    with pytest.raises(InputError, match=r"without a preprocessor_config\.json"):
        predict(task, Loaded(looking(task, LABELS).model), EXAMPLES)


def test_pictures_of_one_batch_that_differ_in_size_are_refused() -> None:
    task, images = find("picture"), Images(size=4, mean=(0.5,), deviation=(0.5,))
    wide = Pictured(np.zeros((8, 16), np.uint8), "wide")
    with pytest.raises(InputError, match="must come out in one size"):
        task.prepare(asked(task, [EXAMPLES[0], wide], images), False)


def test_a_file_says_what_its_pixels_say(tmp_path: Path) -> None:
    task = CASES["picture"].make()
    loaded = looking(task, LABELS)
    Image.fromarray(EXAMPLES[0].picture).save(tmp_path / "a.png")
    named = example_of(task, str(tmp_path / "a.png"), "here")
    assert torch.equal(*task.prepare(asked(task, [named, EXAMPLES[0]]), False).source.values)
    (((_, ours),), ((_, theirs),)) = logits_of(task, loaded, [named, EXAMPLES[0]])
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    (told,) = (one.told for one in say(task, loaded, [named], best=3))
    assert sum(told["probabilities"].values()) == pytest.approx(1)
    assert (shown(named), shown(EXAMPLES[0])) == (str(tmp_path / "a.png"), "p:0")
