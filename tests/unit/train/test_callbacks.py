"""Callbacks: called at steps, validations and checkpoints, without an effect on the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from words import write_task

from qkv.errors import InputError
from qkv.recipe import read_recipe
from qkv.recipe.registries import CALLBACKS
from qkv.train.callbacks import Callback
from qkv.train.fit import fit

CHANGES = ["train.max_steps=6", "train.log_every=2", "train.save_every=3", "validation.every_steps=3"]


class Recorder(Callback):
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def on_step(self, trainer, record):  # noqa: ARG002
        assert "loss" in record.values
        self.calls.append(("step", record.step))

    def on_validation(self, trainer, metrics):
        assert trainer.workload.metric in metrics
        assert trainer.model.training  # back from eval mode
        self.calls.append(("valid", trainer.train_state.step))

    def on_checkpoint(self, trainer, path):
        assert (path / "last.safetensors").is_file()
        self.calls.append(("save", trainer.train_state.step))


def train(recipe: Path, folder: Path, *callbacks: Callback, changes: list[str] | None = None) -> bytes:
    list(fit(read_recipe(recipe, CHANGES + (changes or [])), folder, device="cpu", callbacks=callbacks))
    return (folder / "model.safetensors").read_bytes()


def test_callbacks_are_called_at_steps_validations_and_checkpoints(tmp_path: Path) -> None:
    recorder = Recorder()
    train(write_task(tmp_path), tmp_path / "run", recorder)
    expected = [("step", 2), ("valid", 3), ("save", 3), ("step", 4), ("step", 6), ("valid", 6), ("save", 6)]
    assert recorder.calls == expected


def test_a_callback_that_does_nothing_leaves_the_weights_equal_to_the_bit(tmp_path: Path) -> None:
    recipe = write_task(tmp_path)
    assert train(recipe, tmp_path / "with", Callback()) == train(recipe, tmp_path / "without")


def test_a_registered_callback_is_named_in_the_recipe_and_can_end_the_run(tmp_path: Path) -> None:
    class StopAtFirstValidation(Callback):
        def on_validation(self, trainer, metrics):  # noqa: ARG002
            trainer.train_state.finished = True

    CALLBACKS.register("stop_at_first_validation", StopAtFirstValidation)
    changes = [*CHANGES, "train.callbacks=[stop_at_first_validation]"]
    records = list(fit(read_recipe(write_task(tmp_path), changes), tmp_path / "run", device="cpu"))
    assert records[-1].kind == "final"
    assert records[-1].step == 3


def test_an_unknown_callback_and_one_of_another_class_are_refused(tmp_path: Path) -> None:
    recipe = write_task(tmp_path)
    with pytest.raises(InputError, match="there is no callback 'nothing'"):
        read_recipe(recipe, ["train.callbacks=[nothing]"])
    with pytest.raises(InputError, match="a callback derives from"):
        train(recipe, tmp_path / "run", object())  # type: ignore[arg-type]
