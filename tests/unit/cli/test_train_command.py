"""`qkv train`: options that set recipe keys, --print-recipe, --dry-run and --resume."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.append(str(Path(__file__).parents[1] / "train"))
sys.path.append(str(Path(__file__).parent))
from reviews import write_model, write_reviews
from test_cli import must_refuse, qkv
from words import write_task

from qkv.recipe import read_recipe


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, reviews, and a recipe of pairs."""
    folder = tmp_path_factory.mktemp("home")
    write_model("bert", folder / "bert")
    write_reviews(folder / "reviews.csv", 40)
    write_task(folder)
    return folder


TASK = ("train", "--task", "classify", "--data", "reviews.csv", "--text", "review", "--label", "stars")
TASK += ("--init-from", "bert")


def printed_recipe(home: Path, *words: object) -> dict[str, Any]:
    done = qkv(*words, "--print-recipe", cwd=home)
    assert done.returncode == 0, done.stderr
    recipe: dict[str, Any] = yaml.safe_load(done.stdout)
    return recipe


def test_each_plain_option_sets_its_key_and_says_so_in_one_line(home: Path) -> None:
    options = ("--epochs", 2, "--learning-rate", 0.01, "--batch-size", 8, "--test", "reviews.csv")
    for words in (TASK, ("train", "transformer.yaml")):
        done = qkv(*words, *options, "--print-recipe", cwd=home)
        recipe = yaml.safe_load(done.stdout)
        train = recipe["train"]
        assert (train["epochs"], train["max_steps"]) == (2, None)
        assert (train["batch_size"], train["batch_tokens"]) == (8, None)
        assert train["learning_rate"] == 0.01
        assert recipe["data"]["test"] == "reviews.csv"
        assert done.stderr.splitlines() == [
            "--epochs sets train.epochs=2.0; --learning-rate sets train.learning_rate=0.01; "
            "--batch-size sets train.batch_size=8; --test sets data.test=reviews.csv"
        ]


def test_options_of_the_data_change_a_recipe_too(home: Path) -> None:
    options = ("--valid", "v.csv", "--text-pair", "b", "--delimiter", ";", "--encoding", "latin-1", "--skip-bad")
    (home / "task.yaml").write_text(qkv(*TASK, "--print-recipe", cwd=home).stdout)
    data = printed_recipe(home, "train", "task.yaml", *options, "--data", "2024", "data.hold_out={}")["data"]
    assert (data["train"], data["valid"]) == ("2024", "v.csv")
    assert data["columns"] == {"text": "review", "label": "stars", "text_pair": "b"}
    assert (data["delimiter"], data["encoding"], data["skip_bad"]) == (";", "latin-1", True)


def test_init_from_replaces_the_model_of_a_recipe(home: Path) -> None:
    recipe = printed_recipe(home, "train", "transformer.yaml", "--init-from", "other")
    assert recipe["model"] == {"init_from": "other", "dropout": 0.1}
    assert recipe["tokenizer"] is None


def test_a_printed_recipe_is_one_that_train_accepts(home: Path) -> None:
    done = qkv(*TASK, "--epochs", 1, "--print-recipe", cwd=home)
    (home / "printed.yaml").write_text(done.stdout)
    again = qkv("train", "printed.yaml", "--print-recipe", cwd=home)
    assert again.stdout == done.stdout


def test_a_dry_run_describes_the_run_and_writes_nothing(home: Path) -> None:
    before = sorted(path.name for path in home.iterdir())
    done = qkv(*TASK, "--max-steps", 7, "--batch-size", 8, "--dry-run", cwd=home)
    assert done.returncode == 0, done.stderr
    assert "training and" in done.stdout
    assert "2 labels" in done.stdout
    assert "7 steps in all" in done.stdout
    assert "parameters" in done.stdout
    assert "FLOP" in done.stdout
    pairs = qkv("train", "transformer.yaml", "--dry-run", cwd=home)
    assert "120 training pairs and 10 validation examples" in pairs.stdout
    assert sorted(path.name for path in home.iterdir()) == before


def test_resume_continues_the_run_in_output_with_its_own_recipe(home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    must_refuse(qkv("train", "transformer.yaml", "--resume", "-o", run, cwd=home), "holds no run")
    must_refuse(qkv("train", "--resume", "-o", run, cwd=home), "holds no run")
    must_refuse(qkv("train", "--resume", cwd=home), "--resume needs --output")
    assert not run.exists()
    assert qkv("train", "transformer.yaml", "-o", run, cwd=home).returncode == 0
    done = qkv("train", "--resume", "-o", run, "--max-steps", 16, cwd=home)
    assert done.returncode == 0, done.stderr
    assert "step 16" in done.stdout
    assert read_recipe(run / "recipe.yaml").train.max_steps == 16


def test_a_recipe_is_trained_by_the_name_of_a_packaged_one(home: Path) -> None:
    assert printed_recipe(home, "train", "g2p-demo")["name"] == "g2p-demo"
    must_refuse(qkv("train", "g2p-dmeo", cwd=home), "no such recipe; did you mean 'g2p-demo'?")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--dry-run", "--print-recipe"), "--dry-run and --print-recipe exclude each other"),
        (("--find-lr", "--num-seeds", "3"), "--find-lr and --num-seeds exclude each other"),
        (("--resume", "--num-seeds", "3"), "--resume continues one run; leave out --num-seeds"),
        (("--num-seeds", "1"), "--num-seeds: 1 is too small"),
        (("--num-folds", "100000"), "--num-folds: 100,000 runs are too many"),
        (("--epochs", "2", "--max-steps", "3"), "max_steps and epochs are both set"),
        (("--epochs", "0"), "key 'train.epochs' cannot be 0.0: it must be more than 0"),
        (("--batch-size", "-1"), "key 'train.batch_size' cannot be -1: it must be 1 or more"),
        (("--learning-rate", "nan"), "it must be a finite number"),
        (("--device", "cpu:x"), "--device"),
        (("--lr", "1"), "no option '--lr'; qkv calls it --learning-rate"),
        (("--num_train_epochs", "1"), "no option '--num_train_epochs'; qkv calls it --epochs"),
        (("--weight_decay", "1"), "no option '--weight_decay'; write train.weight_decay=VALUE, without dashes"),
        (("--output_dir", "x"), "no option '--output_dir'; qkv calls it --output"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_one_line(home: Path, words: tuple[str, ...], message: str) -> None:
    must_refuse(qkv("train", "transformer.yaml", *words, cwd=home), message)
