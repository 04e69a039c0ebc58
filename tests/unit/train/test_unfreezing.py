"""ULMFiT's training: one more layer at a time, rates per layer, and a slanted triangle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_pretraining import run_all, weights
from test_streams import recipe_of

from qkv.checkpoints import load
from qkv.errors import InputError
from qkv.recipe.parse import parse_recipe
from qkv.train.fit import fit
from qkv.train.schedule import learning_rate_at

ROWS = "text,label\n" + "".join(
    f"{who} {does} tea.,{'yes' if who == 'The cat' else 'no'}\n"
    for who in ("The cat", "A dog", "My aunt")
    for does in ("sees", "likes", "finds", "drinks")
)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    model = {"family": "awd_lstm", "d_model": 8, "hidden_size": 12, "layers": 2}
    run_all(recipe_of(folder, model=model, train={"max_steps": 2}), folder / "run")
    return folder / "run"


def classifier(pretrained: Path, folder: Path, epochs: int, **finetune: Any) -> Any:
    (folder / "rows.csv").write_text(ROWS, encoding="utf-8")
    raw = {
        "name": "classifier",
        "task": "text_classification",
        "data": {"format": "csv", "train": str(folder / "rows.csv"), "hold_out": {"valid": 0.3}},
        "model": {"init_from": str(pretrained)},
        "finetune": {"unfreeze_epochs": 1, "layerwise_lr_decay": 0.5} | finetune,
        "train": {
            "epochs": epochs, "batch_size": 4, "schedule": "slanted_triangular", "save_every": 1, "log_every": 1,
        },
        "validation": {"keep": "last"},
    }  # fmt: skip
    return parse_recipe(raw, "test")


def changed_modules(before: Path, after: Path) -> set[str]:
    """Return the modules of the backbone whose weights differ."""
    old, new = load(before).model.state_dict(), load(after).model.state_dict()
    shared = [name for name in old if not name.startswith("head.")]
    return {".".join(name.split(".")[:3]) for name in shared if not torch.equal(old[name], new[name])}


def test_one_more_layer_is_trained_in_each_epoch(pretrained: Path, tmp_path: Path) -> None:
    layers = ["decoder.layers.1", "decoder.layers.0", "target_embedding.tokens.weight"]
    for epochs in (1, 2, 4):
        run_all(classifier(pretrained, tmp_path, epochs), tmp_path / f"run{epochs}")
        assert changed_modules(pretrained, tmp_path / f"run{epochs}") == set(layers[: epochs - 1])


def test_a_stopped_run_resumes_to_the_bit(pretrained: Path, tmp_path: Path) -> None:
    recipe = classifier(pretrained, tmp_path, 3)
    run_all(recipe, tmp_path / "whole")
    stopped = fit(recipe, tmp_path / "cut", device="cpu")
    for _ in range(4):
        next(record for record in stopped if record.kind == "train")
    stopped.close()
    run_all(recipe, tmp_path / "cut")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


def test_a_frozen_backbone_is_not_unfrozen(pretrained: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unfreeze_epochs"):
        classifier(pretrained, tmp_path, 1, trainable="head", layerwise_lr_decay=1.0)


def test_the_rate_of_a_slanted_triangle_rises_soon_and_ends_at_a_32nd() -> None:
    rates = [
        learning_rate_at("slanted_triangular", step, peak_lr=1.0, warmup_steps=10, max_steps=100)
        for step in range(1, 101)
    ]
    assert max(rates) == rates[9] == 1.0
    assert rates[54] == pytest.approx((1 + 1 / 32) / 2)
    assert rates[-1] == pytest.approx(1 / 32)
