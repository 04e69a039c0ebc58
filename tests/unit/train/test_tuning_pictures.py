"""A ViT learns pictures from nothing or from a checkpoint, resumes to the bit, and is saved with what it needs."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "data" / "formats"))
from small_pictures import NAMES, recipe_of, write_folder, write_idx, write_table

from qkv.checkpoints import load, save
from qkv.data.formats import read
from qkv.errors import InputError
from qkv.recipe.parse import validate_recipe
from qkv.tasks.base import predict
from qkv.tasks.head_outputs import iter_outputs
from qkv.train.auto_recipe import make_recipe
from qkv.train.fit import fit
from qkv.train.workloads.finetuning import FinetuneWorkload
from qkv.train.workloads.task_data import read_split

LONG = {"max_steps": 160, "learning_rate": 0.01, "log_every": 50, "save_every": 100}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_idx(tmp_path_factory.mktemp("pictures") / "idx")


@pytest.fixture(scope="module")
def learned(home: Path) -> Path:
    """A run that knows its pictures."""
    recipe = recipe_of(
        home,
        train=LONG,
        validation={"every_steps": 40},
        task={"name": "image_classification", "max_shift": 1, "random_erasing": 0.1},
    )
    records = train(recipe, home.parent / "run")
    assert records[-1].values["accuracy"] > 0.8  # a third of them is of each class
    return home.parent / "run"


def train(plain: dict[str, Any], folder: Path) -> list[Any]:
    return list(fit(validate_recipe(plain, "here"), folder, device="cpu"))


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_vit_learns_from_nothing_and_its_run_holds_no_tokeniser(learned: Path, home: Path) -> None:
    loaded = load(learned)
    assert loaded.source_tokenizer is None
    assert loaded.image_processor is not None
    assert loaded.model.spec.head.labels == tuple(sorted(NAMES))
    work = FinetuneWorkload.build(validate_recipe(recipe_of(home), "here"), Path("/nowhere"))
    test = read("idx", home, split="test", columns={"names": NAMES})
    right = [said == one.label for said, one in zip(predict(work.task, loaded, test), test, strict=True)]
    assert sum(right) / len(right) > 0.8


@pytest.mark.parametrize(
    "changes", [{}, {"gradient_accumulation_steps": 2, "num_workers": 2, "ema_decay": 0.9}], ids=["plainly", "in parts"]
)
def test_training_on_varied_pictures_resumes_to_the_bit(home: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    recipe = recipe_of(home, train={"save_every": 1, **changes})
    train(recipe, tmp_path / "whole")
    stopped = fit(validate_recipe(recipe, "here"), tmp_path / "cut", device="cpu")
    for _ in range(3):
        next(stopped)
    stopped.close()
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    torch.manual_seed(99)
    train(recipe, tmp_path / "cut")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


def test_pictures_are_varied_anew_in_every_epoch_and_alike_in_every_part(home: Path) -> None:
    work = FinetuneWorkload.build(validate_recipe(recipe_of(home), "here"), Path("/nowhere"))
    seen: list[dict[int, torch.Tensor]] = []
    for epoch in (0, 1):
        seen.append({})
        for _, batch in islice(work.batches_from(epoch, 0), work.steps_per_epoch()):
            whole = work.collate(batch, 1).source.values
            assert torch.equal(torch.cat([work.collate(part, 9).source.values for part in batch.split(3)]), whole)
            seen[-1] |= {one.example_index: values for one, values in zip(batch.features, whole, strict=True)}
    same = [torch.equal(seen[0][number], seen[1][number]) for number in seen[1]]
    assert len(same) == len(work.features)
    assert sum(same) < len(same) / 4


def test_other_pictures_are_other_training_data(home: Path, tmp_path: Path) -> None:
    recipe = recipe_of(home, train={"save_every": 1})
    digests = {FinetuneWorkload.build(validate_recipe(recipe, "here"), tmp_path).fingerprint() for _ in range(2)}
    assert len(digests) == 1
    other = write_idx(tmp_path / "other", {"t10k": 1, "train": 90})
    assert FinetuneWorkload.build(validate_recipe(recipe_of(other), "here"), tmp_path).fingerprint() not in digests


@pytest.mark.parametrize("format", ["qkv", "huggingface"])
def test_out_and_in_again_says_the_same_of_the_same_pictures(learned: Path, home: Path, tmp_path: Path, format) -> None:
    loaded = load(learned)
    save(loaded, tmp_path / "out", format)
    again = load(tmp_path / "out")
    task = FinetuneWorkload.build(validate_recipe(recipe_of(home), "here"), Path("/nowhere")).task
    test = read("idx", home, split="test")
    test = [one.__class__(one.image, one.location) for one in test]
    ours, theirs = (dict(iter_outputs(task, one, test)) for one in (loaded, again))
    assert all(torch.equal(ours[i][0][1], theirs[i][0][1]) for i in range(len(test)))
    assert again.model.spec.head.labels == tuple(sorted(NAMES))


def test_transformers_reads_what_was_learned_here(learned: Path, home: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save(load(learned), tmp_path / "out", "huggingface")
    theirs = transformers.ViTForImageClassification.from_pretrained(tmp_path / "out").eval()
    processor = transformers.ViTImageProcessorPil.from_pretrained(tmp_path / "out")
    test = [one.__class__(one.image, one.location) for one in read("idx", home, split="test")]
    task = FinetuneWorkload.build(validate_recipe(recipe_of(home), "here"), Path("/nowhere")).task
    outputs = dict(iter_outputs(task, load(learned), test))
    ours = torch.cat([outputs[index][0][1] for index in range(len(test))])
    with torch.no_grad():
        given = processor(
            [one.image[..., None] for one in test], return_tensors="pt", input_data_format="channels_last"
        )
        wanted = theirs(**given).logits
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)
    assert theirs.config.id2label == dict(enumerate(sorted(NAMES)))


@pytest.mark.parametrize(
    "tune", [{}, {"lora": {"rank": 2}}, {"feature_layers": "scalar_mix"}, {"class_weights": "balanced"}]
)
def test_a_checkpoint_goes_on_under_a_fresh_head_with_its_own_means(
    learned: Path, tmp_path: Path, tune: dict[str, Any]
) -> None:
    save(load(learned), tmp_path / "start", "huggingface")
    write_folder(tmp_path / "own" / "train", 24)
    (tmp_path / "own" / "train" / "bright").rename(tmp_path / "own" / "train" / "white")
    write_folder(tmp_path / "own" / "val", 6)
    (tmp_path / "own" / "val" / "bright").rename(tmp_path / "own" / "val" / "white")
    data = {"format": "images", "train": str(tmp_path / "own"), "columns": {}, "hold_out": {}}
    plain = recipe_of(tmp_path, data=data, model={"init_from": str(tmp_path / "start")}, train={"max_steps": 4}) | {
        "finetune": tune
    }
    note = train(plain, tmp_path / "run")[0]
    assert note.samples[0] == "24 training and 6 validation examples"
    loaded = load(tmp_path / "run")
    assert loaded.model.spec.head.labels == ("dark", "striped", "white")
    assert loaded.image_processor == load(learned).image_processor


def test_a_table_of_ones_own_pictures_makes_a_recipe(learned: Path, tmp_path: Path) -> None:
    table = write_table(tmp_path / "mine.csv", write_folder(tmp_path / "pictures", 40))
    raw, _ = make_recipe("image_classification", str(table), str(learned), ["train.max_steps=3"])
    assert raw["data"]["format"] == "images"
    assert raw["data"]["hold_out"] == {"valid": 0.1}
    assert raw["train"]["batch_tokens"] == 3 * 17  # ten steps an epoch of what is not held out
    assert train(raw, tmp_path / "run")[-1].kind == "final"


@pytest.mark.parametrize(("kind", "wanted"), [("idx", "idx"), ("flat", "images"), ("parts", "images")])
def test_a_folder_says_itself_how_its_pictures_are_written(tmp_path: Path, kind: str, wanted: str) -> None:
    if kind == "idx":
        write_idx(tmp_path)
    else:
        write_folder(tmp_path / "train" if kind == "parts" else tmp_path)
    if kind == "parts":
        write_folder(tmp_path / "val", 6)
    raw, _ = make_recipe(
        "image_classification", str(tmp_path), None, ["model.family=vit", "model.image_size=8", "model.patch_size=4"]
    )
    assert raw["data"]["format"] == wanted
    assert ("hold_out" in raw["data"]) == (kind != "parts")


def test_pictures_are_held_out_by_what_they_show(home: Path, tmp_path: Path) -> None:
    recipe = validate_recipe(recipe_of(home), "here")
    held, rest = (read_split(recipe.data, part) for part in ("valid", "train"))
    assert len(held) + len(rest) == 90
    assert 9 < len(held) < 36
    elsewhere = write_idx(tmp_path / "again", {"train": 90}, packed=True)
    again = read_split(validate_recipe(recipe_of(elsewhere), "here").data, "valid")
    assert [one.content_hash() for one in again] == [one.content_hash() for one in held]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"task": {"max_shift": -1}}, "task.max_shift is a number of pixels"),
        ({"task": {"rotate": 3}}, "task: image_classification: .*rotate"),
        ({"task": {"mean": [1, 2]}}, "task.mean"),
        ({"model": {"family": "bert"}}, "model.family: bert reads text"),
        ({"data": {"hold_out": {}}}, "no split 'dev'"),
        ({"tokenizer": {"vocab_size": 100}}, "tokenizer: a model of images has none"),
        ({"train": {"batch_tokens": 16}}, "set train.batch_tokens to 17 or more"),
    ],
)
def test_a_slip_in_a_recipe_of_pictures_is_one_line(
    home: Path, tmp_path: Path, sections: dict[str, Any], said: str
) -> None:
    plain = recipe_of(home, **sections)
    if sections.get("model"):
        plain["model"] = {"family": "bert", "size": "mini"}
    with pytest.raises(InputError, match=said) as found:
        train(plain, tmp_path / "run")
    assert "\n" not in str(found.value)


def test_a_folder_without_parts_is_never_its_own_validation(tmp_path: Path) -> None:
    write_folder(tmp_path / "flat")
    data = {"format": "images", "train": str(tmp_path / "flat"), "columns": {}, "hold_out": {}}
    with pytest.raises(InputError, match="the recipe has no 'valid' data"):
        train(recipe_of(tmp_path, data=data), tmp_path / "run")
