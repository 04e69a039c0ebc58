"""Hyper-parameter search: trials, pruning, resumption, the best recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
from words import write_task

from qkv.errors import InputError
from qkv.recipe import read_recipe
from qkv.recipe.search_space import parse_search_space
from qkv.train import sweep as sweep_module
from qkv.train.sweep import Sweep, TrialResult

pytest.importorskip("optuna", reason="optuna, an extra, is not installed")
FIXED = ["train.max_steps=4", "validation.every_steps=2", "train.average_checkpoints=1"]
SPACE = ["train.learning_rate=1e-5..1e-2:log", "train.schedule=linear,constant", *FIXED]


def open_sweep(tmp_path: Path, space: list[str] = SPACE, prune: bool = False) -> Sweep:
    recipe = tmp_path / "transformer.yaml"
    if not recipe.is_file():
        write_task(tmp_path)
    return Sweep(recipe, parse_search_space(space), tmp_path / "sweep", prune=prune, seed=None)


def run(tmp_path: Path, num_trials: int, **options: object) -> list[TrialResult]:
    search = open_sweep(tmp_path, **options)  # type: ignore[arg-type]
    results = list(search.run(num_trials, "cpu"))
    search.write_results(keep_all=False)
    return results


def test_the_best_trial_gives_the_best_recipe_and_only_its_weights_remain(tmp_path: Path) -> None:
    results = run(tmp_path, 3)
    assert [result.state for result in results] == ["complete"] * 3
    best = min(results, key=lambda result: result.metric or 0.0)  # an error rate
    recipe = read_recipe(tmp_path / "sweep" / "best.yaml")
    assert recipe.train.learning_rate == best.values["train.learning_rate"]
    assert recipe.train.schedule == best.values["train.schedule"]
    assert [result.folder for result in results if (result.folder / "model.safetensors").is_file()] == [best.folder]
    assert all((result.folder / "log.jsonl").is_file() for result in results)
    rows = (tmp_path / "sweep" / "trials.tsv").read_text().splitlines()
    assert rows[0].split("\t")[:2] == ["trial", "state"]
    assert len(rows) == 4


def test_a_sweep_continues_where_it_ended_and_does_not_repeat_its_draws(tmp_path: Path) -> None:
    first = run(tmp_path, 2)
    assert run(tmp_path, 2) == []
    (third,) = run(tmp_path, 3)
    assert third.number == 3
    assert third.values not in [result.values for result in first]


def test_an_interrupted_trial_is_resumed_with_its_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = sweep_module.fit

    def interrupted_fit(*args, **options):
        for record in fit(*args, **options):
            if record.kind == "valid":
                raise KeyboardInterrupt
            yield record

    monkeypatch.setattr(sweep_module, "fit", interrupted_fit)
    search = open_sweep(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        list(search.run(1, "cpu"))
    (values,) = (search._values(trial) for trial in search.study.get_trials())
    monkeypatch.setattr(sweep_module, "fit", fit)
    (result,) = run(tmp_path, 1)
    assert result.values == values
    assert result.state == "complete"


def test_trials_worse_than_the_median_are_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "_STARTUP_TRIALS", 1)
    write_task(tmp_path)
    space = [
        "train.learning_rate=0.01,1e-9",
        "train.max_steps=12",
        "validation.every_steps=4",
        "validation.metric=loss",
    ]
    good, bad = 0, 1  # indices of the learning rates
    search = open_sweep(tmp_path, space, prune=True)
    for index in (good, good, bad):
        search.study.enqueue_trial({"train.learning_rate": index})
    results = list(search.run(3, "cpu"))
    assert [result.state for result in results] == ["complete", "complete", "pruned"]
    assert results[-1].step < 12


def test_other_ranges_and_other_folders_are_refused(tmp_path: Path) -> None:
    run(tmp_path, 1)
    with pytest.raises(InputError, match="holds a sweep of another recipe or with other ranges"):
        open_sweep(tmp_path, ["train.learning_rate=1e-6..1e-2:log", *FIXED])
    (tmp_path / "sweep" / "space.json").unlink()
    with pytest.raises(InputError, match="already exists and is no sweep"):
        open_sweep(tmp_path)


def test_a_misspelled_key_is_refused_before_the_first_trial(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="learning_rate"):
        open_sweep(tmp_path, ["train.learning_rat=1e-5..1e-2:log"])
    assert not (tmp_path / "sweep").exists()


def test_trials_that_all_fail_end_the_sweep_with_their_reason(tmp_path: Path) -> None:
    recipe = write_task(tmp_path)
    (tmp_path / "train.dict").unlink()
    with pytest.raises(InputError, match=r"the first 3 trials failed, the last: .*train.dict"):
        list(Sweep(recipe, parse_search_space(SPACE), tmp_path / "sweep", prune=False, seed=None).run(5, "cpu"))
