"""Several seeds and folds: each is a run of its own, none is repeated, and their spread is told."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest
from reviews import recipe_text, write_model, write_reviews

sys.path.append(str(Path(__file__).parents[1] / "cli"))
from test_cli import must_refuse, qkv
from words import write_task

from qkv.recipe import read_recipe
from qkv.train.multi_run import final_metrics, with_folds


@pytest.fixture
def home(tmp_path) -> Path:
    write_reviews(tmp_path / "mine.csv", 60)
    write_model("bert", tmp_path / "bert")
    (tmp_path / "r.yaml").write_text(recipe_text(tmp_path / "bert", tmp_path / "mine.csv", train={"max_steps": 4}))
    return tmp_path


def test_several_seeds_give_a_mean_and_a_deviation(home):
    done = qkv("train", "r.yaml", "--num-seeds", "3", "-o", "out", cwd=home)
    assert done.returncode == 0, done.stderr
    told = json.loads((home / "out-seeds.json").read_text())
    assert told["runs"] == ["seed1", "seed2", "seed3"]
    runs = [final_metrics(home / f"out-seed{seed}") for seed in (1, 2, 3)]
    values = [run["accuracy"] for run in runs]
    accuracy = told["metrics"]["accuracy"]
    assert accuracy["values"] == values
    assert accuracy["mean"] == pytest.approx(sum(values) / 3)
    assert accuracy["std"] == pytest.approx(statistics.stdev(values))
    weights = {(home / f"out-seed{seed}" / "model.safetensors").read_bytes() for seed in (1, 2, 3)}
    assert len(weights) == 3
    assert [read_recipe(home / f"out-seed{seed}" / "recipe.yaml").seed for seed in (1, 2, 3)] == [1, 2, 3]
    assert "mean" in done.stdout
    assert "std" in done.stdout


def test_a_finished_seed_is_not_repeated(home):
    qkv("train", "r.yaml", "--num-seeds", "2", "-o", "out", cwd=home)
    before = (home / "out-seed1" / "model.safetensors").stat().st_mtime_ns
    done = qkv("train", "r.yaml", "--num-seeds", "3", "-o", "out", cwd=home)
    assert done.stdout.count("finished at step") == 1
    assert (home / "out-seed1" / "model.safetensors").stat().st_mtime_ns == before
    assert len(json.loads((home / "out-seeds.json").read_text())["runs"]) == 3


def test_a_kept_mean_of_checkpoints_is_scored_as_such(home):
    qkv("train", "r.yaml", "train.average_checkpoints=2", "validation.every_steps=1", "-o", "run", cwd=home)
    lines = [json.loads(line) for line in (home / "run" / "log.jsonl").read_text().splitlines()]
    found = final_metrics(home / "run")
    kept = lines[-1] if lines[-1]["num_averaged_checkpoints"] else next(
        line for line in lines if line["kind"] == "valid" and line["step"] == lines[-1]["best_step"]
    )  # fmt: skip
    assert found["accuracy"] == kept["accuracy"]
    assert not {"kind", "step", "seconds"} & found.keys()


def test_folds_hold_out_each_example_once(home):
    done = qkv("train", "r.yaml", "--num-folds", "3", "-o", "out", cwd=home)
    assert done.returncode == 0, done.stderr
    told = json.loads((home / "out-folds.json").read_text())
    assert told["runs"] == ["fold1of3", "fold2of3", "fold3of3"]
    counts = [json.loads((home / f"out-{run}" / "log.jsonl").read_text().splitlines()[0]) for run in told["runs"]]
    held = [int(count["samples"][0].split(" and ")[1].split()[0]) for count in counts]
    assert sum(held) == 60


def test_a_fold_keeps_the_test_part_apart(home):
    recipe = read_recipe(home / "r.yaml", ["data.hold_out={valid: 0.1, test: 0.2}"])
    for one in with_folds(recipe, home / "out", 2):
        assert one.recipe.data.hold_out == {"test": 0.2}
        assert one.recipe.data.valid is None


def test_pairs_have_seeds_and_no_folds(tmp_path):
    recipe = write_task(tmp_path)
    must_refuse(qkv("train", recipe, "--num-folds", "2", "-o", "out", cwd=tmp_path), "--num-folds goes with tasks")
    done = qkv("train", recipe, "train.max_steps=2", "--num-seeds", "2", "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "token_error_rate" in json.loads((tmp_path / "out-seeds.json").read_text())["metrics"]


def test_a_class_that_lies_in_one_fold_is_said_before_the_first_run(home):
    write_reviews(home / "mine.csv", 60, extra=[("a lonely word", "lonely")])
    done = qkv("train", "r.yaml", "--num-folds", "3", "-o", "out", cwd=home)
    must_refuse(done, "--num-folds: all examples of 'lonely' are in fold", "another number of folds")
    assert not list(home.glob("out*"))
