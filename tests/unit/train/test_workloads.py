"""Workloads: each recipe class has one, files are read once, and metrics are checked before data is read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from reviews import recipe_text, write_model, write_reviews
from typer.testing import CliRunner
from words import write_task

from qkv.cli.commands import app
from qkv.errors import InputError
from qkv.recipe import read_recipe
from qkv.recipe.schema import RECIPE_CLASSES
from qkv.train import auto_recipe
from qkv.train.fit import fit
from qkv.train.schedule import resolve_steps
from qkv.train.workload import WORKLOADS, workload_class

METHODS = ["build", "cost_inputs", "fold_recipes", "steps_per_epoch", "losses", "evaluate", "batches_from"]


@pytest.mark.parametrize("key", WORKLOADS.names())
def test_a_workload_declares_its_recipe_class_under_the_same_key(key: str) -> None:
    workload = WORKLOADS.get(key)
    assert workload.recipe_class is RECIPE_CLASSES[key]
    assert workload.recipe_class.key == key
    assert [name for name in METHODS if not callable(getattr(workload, name, None))] == []


def test_a_registered_workload_needs_a_recipe_class_of_its_key() -> None:
    with pytest.raises(InputError, match="recipe_class must be a subclass of BaseRecipe with key = 'embedding'"):
        WORKLOADS.register("embedding", object())
    assert "embedding" not in RECIPE_CLASSES


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_reviews(tmp_path / "mine.csv", 60)
    write_model("bert", tmp_path / "bert")
    text = recipe_text(tmp_path / "bert", tmp_path / "mine.csv", train={"max_steps": 2})
    (tmp_path / "r.yaml").write_text(text)
    return tmp_path


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of the functions that read example files, load models, and parse recipe files."""
    calls: Counter[str] = Counter()

    def count(location: str, kind: str) -> None:
        module, _, name = location.rpartition(".")
        real = getattr(__import__(module, fromlist=[name]), name)

        def counted(*args, **kwargs):
            calls[kind] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(location, counted)

    count("qkv.data.formats.loading.read", "files")
    count("qkv.checkpoints.model_folder.load_tensors", "models")
    count("qkv.yaml_reader.parse_yaml", "yaml")
    return calls


def test_a_fine_tuning_reads_its_file_and_its_model_once(home: Path, counts: Counter[str]) -> None:
    recipe = read_recipe(home / "r.yaml")
    assert counts["yaml"] == 1
    assert list(fit(recipe, home / "run", device="cpu"))[-1].kind == "final"
    assert counts == {"yaml": 1, "files": 1, "models": 1}


def test_training_without_a_recipe_reads_its_file_and_its_model_once(home: Path, counts: Counter[str]) -> None:
    args = ["train", "--task", "classify", "--data", str(home / "mine.csv"), "--text", "review", "--label", "stars"]
    args += ["--init-from", str(home / "bert"), "train.max_steps=2", "-o", str(home / "auto"), "--device", "cpu"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert (home / "auto" / "model.safetensors").is_file()
    assert (counts["files"], counts["models"]) == (1, 1)


def test_parameters_are_counted_without_loading_the_model(home: Path, counts: Counter[str]) -> None:
    columns = {"text": "review", "label": "stars"}
    auto_recipe.make_recipe("classify", str(home / "mine.csv"), str(home / "bert"), columns=columns)
    assert counts["models"] == 0


def test_pairs_that_are_held_out_are_read_with_the_training_pairs(tmp_path: Path, counts: Counter[str]) -> None:
    recipe = read_recipe(write_task(tmp_path), ["data.valid=null", "data.hold_out={valid: 0.2}"])
    workload_class(recipe).build(recipe, tmp_path / "run")
    assert counts["files"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "validation.metric=bleuu",
            "validation.metric: there is no score 'bleuu' of generated texts; did you mean 'bleu'",
        ),
        (
            "test.metrics=[bleu, chrff]",
            "test.metrics: there is no metric 'chrff' of generated texts; did you mean 'chrf'",
        ),
    ],
)
def test_an_unknown_metric_of_pairs_is_refused_before_data_is_read(
    change: str, message: str, tmp_path: Path, counts: Counter[str]
) -> None:
    recipe = read_recipe(write_task(tmp_path), [change])
    with pytest.raises(InputError, match="there is no") as error:
        list(fit(recipe, tmp_path / "run", device="cpu"))
    assert str(error.value).startswith(message)
    assert counts["files"] == 0


def test_epochs_and_ratios_become_steps() -> None:
    recipe = read_recipe(Path("recipes/g2p-demo.yaml"), ["train.warmup_steps=null", "train.warmup_ratio=0.1"])
    length = resolve_steps(recipe, lambda: 1 // 0)  # not called if nothing is given in epochs
    assert length.warmup_steps == round(0.1 * length.max_steps)
    assert length.valid_every == recipe.validation.every_steps


def test_a_resumed_run_says_so_in_one_line_and_notes_its_data_once(home: Path) -> None:
    recipe = read_recipe(home / "r.yaml", ["train.max_steps=4", "train.save_every=1", "train.log_every=1"])
    stopped = fit(recipe, home / "run", device="cpu")
    for record in stopped:
        if record.step == 3:
            break
    stopped.close()
    records = list(fit(recipe, home / "run", device="cpu"))
    assert records[0].kind == "resume"
    assert len(records[0].samples) == 1
    assert records[0].samples[0].startswith(f"resuming {home / 'run'} at step 2 of 4 (epoch 2)")
    log = [json.loads(line) for line in (home / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in log].count("note") == [line["kind"] for line in log].count("resume") == 1
