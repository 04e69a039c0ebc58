"""`qkv.fit` with mappings, paths, tasks and data in memory, and the run that it returns."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import pytest
from reviews import write_model
from words import write_task

import qkv
from qkv.recipe.parse import read_raw_recipe
from qkv.train import display
from qkv.train.fit_arguments import IN_MEMORY, make_plan
from qkv.train.run_log import Record

WORDS = {"good": ("fine", "great"), "bad": ("dull", "poor")}
ROWS = [
    {"review": f"a {word} film {i}", "stars": label}
    for label, words in WORDS.items()
    for word in words
    for i in range(6)
]
FRAME = pd.DataFrame(ROWS)
COLUMNS = {"text": "review", "label": "stars"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return str(write_model("bert", folder / "bert"))


class _Dataset(list[dict[str, Any]]):
    """Rows with the attributes of a Hugging Face dataset."""

    column_names = ("review", "stars")
    features = MappingProxyType({})


@pytest.mark.parametrize("kind", ["frame", "rows", "columns", "splits", "dataset"])
def test_data_in_memory_is_trained_on_and_the_run_remembers_its_columns(kind: str, tmp_path: Path, model: str) -> None:
    data = {
        "frame": FRAME,
        "rows": ROWS,
        "columns": {name: [row[name] for row in ROWS] for name in ("review", "stars")},
        "splits": {"train": FRAME[::2], "validation": ROWS[1::2]},
        "dataset": {"train": _Dataset(ROWS[::2]), "test": _Dataset(ROWS), "valid": _Dataset(ROWS[1::2])},
    }[kind]
    recipe = {"task": "text_classification", "model": {"init_from": model}}
    run = qkv.fit(recipe, tmp_path / "run", data=data, columns=COLUMNS, overrides={"train.max_steps": 2})
    kinds = [record.kind for record in run]
    assert (kinds[-1], run.records[-1].step) == ("final", 2)
    assert "accuracy" in run.metrics
    saved = qkv.read_recipe(tmp_path / "run" / "recipe.yaml")
    assert (saved.data.train, saved.data.columns) == (IN_MEMORY, COLUMNS)
    assert saved.train.learning_rate != 1e-3  # chosen for the model, as by `qkv train --task`
    assert qkv.predict(tmp_path / "run", FRAME["review"])[0].text in WORDS


def test_a_task_with_a_frame_or_a_file_needs_no_recipe(tmp_path: Path, model: str) -> None:
    FRAME.to_csv(tmp_path / "reviews.csv", index=False)
    plans = [
        make_plan(None, task="classify", init_from=model, data=data, columns=COLUMNS, overrides=["seed=3"])
        for data in (FRAME, tmp_path / "reviews.csv")
    ]
    assert plans[0].recipe.train == plans[1].recipe.train
    texts = [[example.text for example in plan.examples["valid"]] for plan in plans]
    assert texts[0] == texts[1] != []
    assert [plan.recipe.seed for plan in plans] == [3, 3]


def test_a_path_a_mapping_and_a_recipe_train_the_same(tmp_path: Path) -> None:
    path = write_task(tmp_path)
    recipes = [path, str(path), read_raw_recipe(path), qkv.read_recipe(path)]
    assert len({str(make_plan(recipe).recipe) for recipe in recipes}) == 1


def test_pairs_in_memory_are_trained_on(tmp_path: Path) -> None:
    raw = read_raw_recipe(write_task(tmp_path))
    pairs = [{"source": f"{a}{b}", "target": f"{a} {b}"} for a in "abcd" for b in "abcd"]
    raw["data"] = {"hold_out": {"valid": 0.3}}
    run = qkv.fit(raw, tmp_path / "run", data=pairs, overrides={"train.max_steps": 1}).run(progress=False)
    assert run.records[-1].kind == "final"
    assert repr(run).startswith(f"Run({str(tmp_path / 'run')!r}, finished, step 1")


def test_a_run_that_is_never_started_warns(tmp_path: Path) -> None:
    run = qkv.fit(write_task(tmp_path), tmp_path / "run")
    assert "not started; iterate over it, or call run()" in repr(run)
    with pytest.warns(UserWarning, match="was never started"):
        run.__del__()
    run.close()


def test_progress_trains_at_once_and_shows_each_step_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    qkv.fit(write_task(tmp_path), tmp_path / "run", overrides={"train.max_steps": 2}, progress=True)
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("finished at step 2")]) == 1


def test_training_records_share_one_line_of_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    values = {"loss": 1.0, "tokens_per_second": 5.0, "eta_seconds": 1.0, "mfu": 0.1}
    records = [Record("note", 0, {}, ("a note",)), *(Record("train", step, values) for step in (1, 2))]
    assert display._display_lines([*records, Record("note", 2, {}, ("end",))], overwrite=True)
    note, first, second, end = capsys.readouterr().out.replace("\n", "\r").split("\r")[:-1]
    assert (note, first[:6], second[:6], end.strip()) == ("a note", "step 1", "step 2", "end")
    assert len(end) == len(second)  # covers the line that it replaces


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "task: expected the name of a task, or a recipe instead"),
        ({"recipe": {"task": "classify"}, "task": "classify"}, "leave out task and init_from, or the recipe"),
        ({"recipe": {"objective": "clm", "train": {}}, "data": ROWS}, "pretraining reads files"),
        ({"task": "classify", "data": {"train": ROWS, "tset": ROWS}}, "there is no split 'tset'"),
        ({"task": "classify", "data": [1, 2]}, "expected a data frame"),
        ({"task": "classify", "data": FRAME}, "no column 'text'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_training(
    arguments: dict[str, Any], message: str, tmp_path: Path, model: str
) -> None:
    if "recipe" not in arguments and arguments:
        arguments = arguments | {"init_from": model}
    with pytest.raises(qkv.InputError, match=message):
        qkv.fit(output=tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()
