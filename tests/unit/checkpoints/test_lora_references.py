"""References of a LoRA run to its base model, and paths that the operating system refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from checkpoints import checkpoint

import qkv
from qkv import spec
from qkv.checkpoints.lora import (
    BASE_REFERENCE,
    LORA_FILE,
    backbone_digest,
    trainable_state_dict,
    write_base_reference,
)
from qkv.checkpoints.safetensors_io import save_tensors
from qkv.nn.construction import set_features_and_lora


def lora_run(folder: Path, base: Path) -> Path:
    """Write a LoRA run on a base model, as training does."""
    model = qkv.load(base, head="sequence", labels=["a", "b"]).model
    digest = backbone_digest(model)
    set_features_and_lora(model, "last", spec.LoraConfig(rank=2))
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter)
    save_tensors(folder / LORA_FILE, trainable_state_dict(model))
    (folder / "spec.json").write_text(spec.to_json(model.spec))
    write_base_reference(folder, str(base), digest)
    return folder


def refusal(folder: str | Path) -> str:
    with pytest.raises(qkv.InputError) as error:
        qkv.load(folder)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 2000
    return str(error.value)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return lora_run(tmp_path / "run", checkpoint(tmp_path / "base"))


def set_base(folder: Path, base: str | Path) -> None:
    reference = json.loads((folder / BASE_REFERENCE).read_text())
    (folder / BASE_REFERENCE).write_text(json.dumps(reference | {"base": str(base)}))


def test_a_chain_of_runs_loads(run: Path, tmp_path: Path) -> None:
    last = lora_run(tmp_path / "last", run)
    assert qkv.load(last).model.spec.lora == spec.LoraConfig(rank=2)


def test_a_run_whose_base_is_itself_is_refused(run: Path) -> None:
    set_base(run, run)
    assert "leads back to the run itself" in refusal(run)


def test_two_runs_that_name_each_other_are_refused(run: Path, tmp_path: Path) -> None:
    other = lora_run(tmp_path / "other", tmp_path / "base")
    set_base(run, other)
    set_base(other, f"{run}/../run")  # another spelling of the same folder
    assert "leads back to the run itself" in refusal(run)


@pytest.mark.parametrize("name", ["x" * 5000, "a/" * 3000, "with\0NUL", "with\nline", "", "."])
def test_a_name_that_is_no_path_is_one_line(run: Path, name: str) -> None:
    set_base(run, name)
    assert "its base model" in refusal(run)


@pytest.mark.parametrize("name", ["x" * 5000, "with\0NUL", "/proc/self/mem", "/dev/zero"])
def test_a_model_name_that_is_no_folder_is_one_line(name: str) -> None:
    refusal(name)


def test_special_files_in_place_of_a_models_files_are_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "bert")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    assert "has no weights" in refusal(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")
    assert "not a model folder" in refusal(folder)


def test_a_folder_that_may_not_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path / "bert")

    def refuse(self: Path, **_: object) -> object:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "stat", refuse)  # a test may run as root, who may read everything
    assert "no permission" in refusal(folder)


def test_a_shard_with_a_name_that_is_too_long_is_one_line(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "bert")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 300}}))
    assert "cannot be opened" in refusal(folder)
