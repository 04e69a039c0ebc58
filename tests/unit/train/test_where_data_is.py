"""Runs that are used in another folder than they were trained in, or without the data that they were trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qkv.checkpoints.lora import read_base_reference, write_base_reference
from qkv.errors import InputError
from qkv.recipe.data_options import IN_MEMORY
from qkv.recipe.finetuning import TaskData
from qkv.recipe.packaged import find_recipe
from qkv.recipe.parse import apply_overrides
from qkv.train.workloads.task_data import read_split


def test_a_relative_base_of_a_lora_run_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    write_base_reference(tmp_path, "models/base", "digest")
    assert read_base_reference(tmp_path)[0] == "models/base"
    monkeypatch.chdir("/")
    assert read_base_reference(tmp_path)[0] == str(tmp_path / "models" / "base")


def test_a_base_by_its_name_has_no_path(tmp_path: Path) -> None:
    write_base_reference(tmp_path, "bert-base-uncased", "digest")
    assert json.loads((tmp_path / "lora.json").read_text()) == {"base": "bert-base-uncased", "digest": "digest"}


def test_data_in_memory_has_to_be_given_again() -> None:
    with pytest.raises(InputError, match="trained on data in memory; give the data again"):
        read_split(TaskData(format="csv", train=IN_MEMORY), "valid")


def test_two_overrides_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(InputError, match="max_steps and epochs are both set"):
        apply_overrides({}, ["train.epochs=1", "train.max_steps=4"])
    raw = {"train": {"max_steps": 4}}
    apply_overrides(raw, ["train.max_steps=null", "train.epochs=2"])
    assert raw == {"train": {"max_steps": None, "epochs": 2}}


def test_a_run_folder_given_as_a_recipe_names_the_command_that_resumes_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"a run is continued by: qkv train --resume -o {tmp_path}"):
        find_recipe(tmp_path)
