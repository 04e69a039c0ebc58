"""Modules that a recipe names are imported for training, never from a run folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from qkv.errors import InputError
from qkv.recipe import read_recipe, read_run_recipe

RECIPE = """
data: {format: tsv, train: train.tsv}
tokenizer: {source: {kind: character}}
model: {family: transformer, size: tiny}
train: {max_steps: 1, schedule: from_a_module}
imports: [module_of_a_run]
"""


def test_a_run_folder_imports_no_module_and_a_recipe_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("module_of_a_run.py").write_text(
        "import qkv\nqkv.register.schedule('from_a_module', lambda step, warmup_steps, max_steps: 1.0)\n"
    )
    Path("recipe.yaml").write_text(RECIPE)
    with pytest.raises(InputError, match="run qkv --import module_of_a_run"):
        read_run_recipe("recipe.yaml")
    assert "module_of_a_run" not in sys.modules
    assert read_recipe("recipe.yaml").train.schedule == "from_a_module"
    assert read_run_recipe("recipe.yaml").imports == ["module_of_a_run"]
