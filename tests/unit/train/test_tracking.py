"""Callbacks for Weights & Biases and MLflow, with modules in their place that record the calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from words import write_task

from qkv.errors import InputError
from qkv.recipe import read_recipe
from qkv.train.fit import fit

CHANGES = ["train.max_steps=4", "train.log_every=2", "validation.every_steps=4", "train.average_checkpoints=1"]


class FakeTracker(SimpleNamespace):
    """Records the calls of both trackers' functions."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        super().__init__(
            init=lambda **options: self._start("init", options),
            start_run=lambda **options: self._start("start_run", options),
            log=lambda values, step: self.calls.append(("log", (step, values))),
            log_metrics=lambda values, step: self.calls.append(("log", (step, values))),
            log_params=lambda values: self.calls.append(("params", values)),
            finish=lambda: self.calls.append(("end", None)),
            end_run=lambda: self.calls.append(("end", None)),
        )

    def _start(self, name: str, options: dict[str, Any]) -> SimpleNamespace:
        self.calls.append((name, options))
        return SimpleNamespace(id="id7", info=SimpleNamespace(run_id="id7"))


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_losses_and_metrics_are_tracked_and_a_resumed_run_continues_its_id(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = FakeTracker()
    monkeypatch.setitem(sys.modules, package, tracker)
    recipe = read_recipe(write_task(tmp_path), [*CHANGES, f"train.callbacks=[{package}]"])
    records = iter(fit(recipe, tmp_path / "run", device="cpu"))
    while next(records).kind != "valid":
        pass
    del records  # the run is given up after its first validation
    started, *_, (last, _) = tracker.calls
    assert last == "end"
    assert started[0] in ("init", "start_run")
    logged = [values for name, values in tracker.calls if name == "log"]
    assert [step for step, _ in logged] == [2, 4, 4]
    assert "train/loss" in logged[0][1]
    assert any(name.startswith("valid/") for name in logged[-1][1])
    assert json.loads((tmp_path / "run" / "tracking.json").read_text()) == {package: "id7"}


def test_a_resumed_run_passes_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = FakeTracker()
    monkeypatch.setitem(sys.modules, "mlflow", tracker)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tracking.json").write_text('{"mlflow": "id3"}')
    list(fit(read_recipe(write_task(tmp_path), [*CHANGES, "train.callbacks=[mlflow]"]), tmp_path / "run", device="cpu"))
    assert tracker.calls[0] == ("start_run", {"run_id": "id3", "run_name": None})


def test_a_missing_package_is_named_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    recipe = read_recipe(write_task(tmp_path), [*CHANGES, "train.callbacks=[wandb]"])
    with pytest.raises(InputError, match=r"callback 'wandb' needs a package: pip install 'qkv\[wandb\]'"):
        list(fit(recipe, tmp_path / "run", device="cpu"))
    assert not (tmp_path / "run").exists()
