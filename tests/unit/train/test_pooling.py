"""Pooling of heads in fine-tuning, a frozen backbone that runs once, and the defaults that depend on both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reviews import recipe_text, write_model, write_reviews

from qkv.checkpoints import ModelBundle, load, save
from qkv.checkpoints.sentence_encoder import sentence_pooling
from qkv.data.rng import CounterRNG
from qkv.errors import InputError
from qkv.families.heads import with_pooling
from qkv.recipe import read_recipe
from qkv.recipe.schema import FinetuneRecipe
from qkv.train.auto_recipe import make_recipe
from qkv.train.fit import fit
from qkv.train.workloads.finetuning import FinetuneWorkload

COLUMNS = {"text": "review", "label": "stars"}
TEXTS = ["the tea is lovely", "awful", "a cat was this house and a sad dog"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with reviews, a tiny BERT, and the same BERT as a sentence encoder."""
    folder = tmp_path_factory.mktemp("pooling")
    write_reviews(folder / "mine.csv")
    write_model("bert", folder / "bert")
    save(load(folder / "bert"), folder / "encoder")
    (folder / "encoder" / "1_Pooling").mkdir()
    config = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (folder / "encoder" / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder


def recipe_of(home: Path, *changes: str) -> FinetuneRecipe:
    path = home / "recipe.yaml"
    path.write_text(recipe_text(home / "bert", home / "mine.csv"))
    recipe = read_recipe(path, list(changes))
    assert isinstance(recipe, FinetuneRecipe)
    return recipe


def logits(bundle: ModelBundle) -> torch.Tensor:
    rows = bundle(TEXTS).logits
    assert rows is not None
    return torch.stack(rows)


@pytest.fixture(scope="module")
def pooled(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose head reads the mean of all tokens."""
    folder = tmp_path_factory.mktemp("run") / "mean"
    list(fit(recipe_of(home, "finetune.pooling=mean", "train.max_steps=3"), folder, device="cpu"))
    return folder


def test_a_run_with_mean_pooling_is_loaded_as_it_was_trained(pooled: Path) -> None:
    bundle = load(pooled)
    head = bundle.model.head
    assert head is not None
    assert head.linear is not None
    assert (head.spec.pool, head.dense) == ("mean", None)
    torch.testing.assert_close(logits(bundle), head.linear(torch.stack(bundle.embed(TEXTS))))


def test_a_pooling_that_transformers_lacks_is_refused_at_export(pooled: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"pools all tokens \(mean\).*finetune.pooling=first"):
        save(load(pooled), tmp_path / "theirs", "huggingface")
    assert not (tmp_path / "theirs").exists()


def test_a_pooled_head_stays_for_the_same_labels_and_goes_for_others(pooled: Path) -> None:
    renamed = load(pooled, head="sequence", labels=["bad", "good"])
    torch.testing.assert_close(logits(renamed), logits(load(pooled)))
    assert renamed.model.spec.head is not None
    assert renamed.model.spec.head.labels == ("bad", "good")
    tagger = load(pooled, head="token", labels=["a", "b", "c"])
    assert set(tagger.missing_keys) == {"head.linear.weight", "head.linear.bias"}
    backbone, before = tagger.model.state_dict(), load(pooled).model.state_dict()
    assert all(torch.equal(backbone[name], before[name]) for name in backbone if not name.startswith("head."))


def test_pooling_is_refused_for_heads_that_read_every_token(home: Path) -> None:
    with pytest.raises(InputError, match="this model has a 'token' head"):
        with_pooling(load(home / "bert", head="token", labels=["a", "b"]).model.spec, "mean")


@pytest.mark.parametrize("change", ["finetune.pooling=mean", "finetune.feature_layers=concat_last_4"])
def test_a_frozen_backbone_runs_once_and_the_loss_is_the_same(change: str, home: Path, tmp_path: Path) -> None:
    workload = FinetuneWorkload.build(recipe_of(home, "finetune.trainable=head", change), tmp_path)
    _, batch = next(workload.batches_from(0, 0))
    inputs = workload.collate(batch, 1)
    rng = CounterRNG(workload.recipe.seed, batch.epoch)
    plain = workload.task.collate_training(batch.features, True, rng)
    assert inputs.head_inputs is not None
    assert plain.head_inputs is None
    model = workload.model().eval()
    (cached,), (computed,) = workload.losses(model, inputs), workload.losses(model, plain)
    torch.testing.assert_close(cached.total, computed.total)
    calls: list[Any] = []
    model.encoder.register_forward_hook(lambda *args: calls.append(args))
    workload.losses(model, inputs)
    assert not calls


@pytest.mark.parametrize("change", ["finetune.pooling=attention", "finetune.feature_layers=scalar_mix"])
def test_trained_layers_below_the_head_are_computed_in_every_step(change: str, home: Path, tmp_path: Path) -> None:
    workload = FinetuneWorkload.build(recipe_of(home, "finetune.trainable=head", change), tmp_path)
    _, batch = next(workload.batches_from(0, 0))
    assert workload.collate(batch, 1).head_inputs is None


def test_the_last_weights_are_kept_if_the_recipe_says_so(home: Path, tmp_path: Path) -> None:
    changes = ["train={epochs: 24, batch_tokens: 512, learning_rate: 0.0}", "validation={keep: last}"]
    records = list(fit(recipe_of(home, *changes), tmp_path / "run", device="cpu"))
    validations = [record.step for record in records if record.kind == "valid"]
    assert len(validations) in (8, 9)  # of 24 epochs, ten at most
    assert records[-1].values["best_step"] == records[-1].step  # though all validations are equal


# ---- defaults -------------------------------------------------------------------------------------------------------


def defaults(home: Path, model: str, *overrides: str, data: str = "mine.csv") -> dict[str, Any]:
    return make_recipe("classify", str(home / data), str(home / model), overrides, columns=COLUMNS).raw


def test_small_sets_get_more_epochs_than_large_ones(home: Path) -> None:
    small = defaults(home, "bert")
    assert (small["train"]["epochs"], small["train"]["learning_rate"]) == (30, 2e-4)
    assert (small["finetune"], small["validation"]) == ({"head_lr_factor": 30.0}, {"keep": "last"})
    write_reviews(home / "large.csv", 12_000)
    assert defaults(home, "bert", data="large.csv")["train"]["epochs"] == 3


def test_patience_keeps_the_best_weights(home: Path) -> None:
    assert defaults(home, "bert", "validation.patience=3")["validation"] == {"patience": 3}


def test_a_frozen_backbone_is_read_by_its_mean_with_a_large_rate(home: Path) -> None:
    raw = defaults(home, "bert", "finetune.trainable=head")
    assert raw["finetune"] == {"trainable": "head", "pooling": "mean"}
    assert raw["train"]["learning_rate"] == 1e-2


def test_sentence_encoders_keep_their_pooling(home: Path) -> None:
    assert (sentence_pooling(home / "bert"), sentence_pooling(home / "encoder")) == (None, "mean")
    assert defaults(home, "encoder")["finetune"]["pooling"] == "mean"
    assert defaults(home, "encoder", "finetune.pooling=first")["finetune"]["pooling"] == "first"
