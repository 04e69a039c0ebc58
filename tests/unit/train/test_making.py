"""A task without a recipe: what the command line makes of a file and a model, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import yaml
from reviews import reviews, write_model, write_reviews

sys.path.append(str(Path(__file__).parents[1] / "cli"))
from test_cli import must_refuse, qkv

from qkv.checkpoints import load, save
from qkv.data.examples import Examples, TextExample
from qkv.errors import InputError
from qkv.recipe import read_recipe
from qkv.recipe.schema import TaskData
from qkv.tasks import get_task
from qkv.train.auto_recipe import make_recipe
from qkv.train.finetune_defaults import default_batch_tokens
from qkv.train.workloads.finetuning_data import check_splits


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("making")
    write_reviews(folder / "mine.csv")
    write_model("bert", folder / "bert")
    return folder


def command(home: Path, *words: object):
    options = [
        "--task",
        "classify",
        "--data",
        "mine.csv",
        "--text",
        "review",
        "--label",
        "stars",
        "--init-from",
        "bert",
    ]
    return qkv("train", *options, *words, cwd=home)


def test_a_person_s_own_file_is_learned_with_no_recipe(home):
    done = command(home, "train.max_steps=4", "-o", "run")
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout.split("\n\n")[0])
    assert shown["train"]["max_steps"] == 4
    assert "epochs" not in shown["train"]
    assert shown["data"]["hold_out"] == {"valid": 0.1}
    assert load(home / "run").model.spec.head.labels == ("1", "5")
    (home / "again.yaml").write_text(done.stdout.split("\n\n")[0])
    run, again = (read_recipe(home / path) for path in ("run/recipe.yaml", "again.yaml"))
    assert run.data.delimiter == ","  # detected
    assert dataclasses.replace(run, data=dataclasses.replace(run.data, delimiter=None)) == again


def test_only_what_a_run_found_out_itself_may_be_missing_in_its_recipe(home):
    assert command(home, "train.max_steps=1", "task.text_pairs=false", "-o", "said").returncode == 0
    done = command(home, "train.max_steps=1", "-o", "said")
    assert done.returncode == 2
    assert "holds a run of another recipe (task.text_pairs was False, is None)" in done.stderr


@pytest.mark.parametrize(("family", "longest"), [("bert", 32), ("t5", None)])
def test_an_exported_tokeniser_knows_how_many_tokens_the_model_takes(family, longest, tmp_path):
    write_model(family, tmp_path / "ours")
    save(load(tmp_path / "ours"), tmp_path / "theirs", "huggingface")
    assert json.loads((tmp_path / "theirs" / "tokenizer_config.json").read_text()).get("model_max_length") == longest


def test_what_is_shown_can_be_changed_and_run_again(home):
    done = command(home, "train.max_steps=2", "finetune.lora.rank=2", "-o", "first")
    (home / "shown.yaml").write_text(done.stdout.split("\n\n")[0])
    again = qkv("train", "shown.yaml", "train.max_steps=3", "-o", "second", cwd=home)
    assert again.returncode == 0, again.stderr
    assert (home / "second" / "lora.safetensors").is_file()


@pytest.mark.parametrize(
    ("task", "name", "format"),
    [
        ("classify", "a.csv", "csv"),
        ("classify", "a.tsv.gz", "tsv"),
        ("regression", "a.jsonl", "jsonl"),
        ("tag", "a.conllu", "conllu"),
        ("tag", "a.conll", "conll"),
        ("tag", "a.jsonl", "words"),
        ("question_answering", "a.json", "squad"),
        ("multiple_choice", "a.jsonl", "choices"),
        ("image_classification", "train-images-idx3-ubyte.gz", "idx"),
        ("image_classification", "train.csv", "images"),
    ],
)
def test_a_files_ending_tells_its_format(task, name, format):
    from qkv.data.formats import infer_format
    from qkv.tasks.base import get_task

    assert infer_format(get_task(task).example_type, Path(name)) == format


def test_a_folder_has_its_own_parts_or_a_tenth_is_held_out(home, tmp_path):
    for part in ("train", "dev"):
        write_reviews(tmp_path / f"{part}.csv")
    given = {"format": "csv", "columns": {"text": "review", "label": "stars"}}
    raw, _ = make_recipe("classify", str(tmp_path), str(home / "bert"), **given)
    assert "hold_out" not in raw["data"]
    (tmp_path / "dev.csv").unlink()
    raw, _ = make_recipe("classify", str(tmp_path), str(home / "bert"), **given)
    assert raw["data"]["hold_out"] == {"valid": 0.1}
    with pytest.raises(InputError, match="is a folder; give the format of its files"):
        make_recipe("classify", str(tmp_path), str(home / "bert"))


def test_bad_lines_are_skipped_counted_and_listed(home):
    (home / "bad.csv").write_text((home / "mine.csv").read_text() + "one field\n,5\n")
    options = ["--task", "classify", "--data", "bad.csv", "--text", "review", "--label", "stars", "--init-from", "bert"]
    must_refuse(
        qkv("train", *options, "train.max_steps=2", "-o", "r", cwd=home), "bad.csv:122: 1 field where the table"
    )
    done = qkv("train", *options, "--skip-bad", "train.max_steps=2", "-o", "skipped", cwd=home)
    assert done.returncode == 0, done.stderr
    assert "2 bad examples were skipped:\n  bad.csv:122" in done.stdout
    assert "bad.csv:123: the column 'review' is empty here" in done.stdout


def test_examples_that_are_all_held_out_are_explained():
    data = TaskData(format="csv", train="same.csv", hold_out={"valid": 0.1})
    held_out = Examples(TextExample("tea", f"same.csv:{line}", label="5") for line in range(2, 62))
    with pytest.raises(InputError, match=r"all 60 examples were held out for validation, .* give --valid FILE"):
        check_splits(data, get_task("text_classification"), Examples(), held_out)


def test_other_columns_and_validation_files_are_named(home):
    rows = [{"first": text, "other": "the tea", "y": label} for text, label in reviews(40)]
    for name in ("pairs.jsonl", "held.jsonl"):
        (home / name).write_text("\n".join(map(json.dumps, rows)))
    done = qkv("train", "--task", "classify", "--data", "pairs.jsonl", "--valid", "held.jsonl", "--init-from", "bert",
               "--reader-option", "text=first", "--reader-option", "text_pair=other", "--reader-option", "label=y",
               "train.max_steps=2", "-o", "pairs", cwd=home)  # fmt: skip
    assert done.returncode == 0, done.stderr
    recipe = read_recipe(home / "pairs" / "recipe.yaml")
    assert recipe.data.columns == {"text": "first", "text_pair": "other", "label": "y"}
    assert (recipe.data.valid, recipe.data.hold_out) == ("held.jsonl", {})


def test_a_slip_on_the_command_line_is_one_line(home):
    start = ["train", "--task", "classify", "--data", "mine.csv"]
    must_refuse(qkv("train", cwd=home), "give a RECIPE, or --task")
    must_refuse(qkv(*start, cwd=home), "give --init-from")
    must_refuse(qkv("train", "--task", "classify", "--init-from", "bert", cwd=home), "give --data")
    must_refuse(qkv(*start, "r.yaml", "--init-from", "bert", cwd=home), "give a RECIPE or --task")
    must_refuse(qkv(*start, "--init-from", "bert", cwd=home), "no column 'text'; the columns are: review, stars")
    must_refuse(
        qkv(*start, "--init-from", "nowhere/at/all", "--text", "review", "--label", "stars", cwd=home), "no such"
    )
    must_refuse(qkv(*start, "--init-from", "bert", "--reader-option", "text", cwd=home), "KEY=VALUE")
    must_refuse(command(home, "--format", "csvv"), "there is no data format 'csvv'")
    must_refuse(command(home, "train.stepps=3"), "unknown key 'train.stepps'; did you mean 'max_steps'")
    must_refuse(command(home, "--num-seeds", "1"), "use 2 or more")
    must_refuse(command(home, "--num-seeds", "2", "--num-folds", "2"), "exclude each other")
    must_refuse(qkv("train", "--task", "tag", "--data", "mine.csv", "--init-from", "bert", cwd=home), "give --format")
    must_refuse(
        qkv("train", "--task", "clasify", "--data", "mine.csv", "--init-from", "bert", cwd=home), "did you mean"
    )


def test_adapters_are_exported_merged_and_not_otherwise(home):
    assert command(home, "train.max_steps=2", "finetune.lora.rank=2", "-o", "adapted").returncode == 0
    must_refuse(qkv("export", "adapted", "-o", "theirs", cwd=home), "merge them (qkv export --merge-lora)")
    for name, to in (("export", "theirs"), ("import", "ours")):
        done = qkv(name, "adapted", "-o", to, "--merge-lora", cwd=home)
        assert done.returncode == 0, done.stderr
        assert load(home / to).model.spec.lora is None
    must_refuse(qkv("export", "ours", "-o", "again", "--merge-lora", cwd=home), "no LoRA weights to merge")
    assert "parameters" in qkv("cost", home / "adapted").stdout


def test_a_small_set_of_short_texts_makes_several_steps_an_epoch_and_long_texts_fit():
    short = [TextExample("a lovely film, really", f"mine.csv:{line}", label="5") for line in range(100)]
    assert 64 <= default_batch_tokens(short) < 200
    assert 400 <= default_batch_tokens(short * 1000) < 600  # 64 examples
    assert default_batch_tokens([TextExample("word " * 5000, "mine.csv:2", label="5")]) == 2048
