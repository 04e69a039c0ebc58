"""`qkv export --adapter` and `qkv import` of adapters; the parity tests compare logits with those of PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import checkpoint
from test_lora_references import lora_run

import qkv
from qkv.cli.import_export import export_checkpoint, import_checkpoint

TEXTS = ["the cat sat on the mat", "unhappy dog"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return lora_run(tmp_path / "run", checkpoint(tmp_path / "base"))


def logits(folder: Path) -> torch.Tensor:
    outputs = qkv.load(folder)(TEXTS).logits
    assert outputs is not None
    return torch.stack(outputs)


def test_an_exported_adapter_names_the_base_of_the_run(run: Path, tmp_path: Path) -> None:
    tokenizer = qkv.load(tmp_path / "base").source_tokenizer
    assert tokenizer is not None
    export_checkpoint(str(run), tmp_path / "adapter", adapter=True)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    assert not (tmp_path / "adapter" / "base").exists()
    adapter = qkv.load(tmp_path / "adapter")
    ours = qkv.load(run)
    assert adapter.model.spec == ours.model.spec
    for name, tensor in ours.model.state_dict().items():
        assert torch.equal(adapter.model.state_dict()[name], tensor), name


def test_an_imported_adapter_needs_no_base_after_it_is_merged(run: Path, tmp_path: Path) -> None:
    export_checkpoint(str(run), tmp_path / "adapter", adapter=True)
    expected = logits(tmp_path / "adapter")
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(qkv.InputError, match="give it with --base"):
        qkv.load(tmp_path / "adapter")
    import_checkpoint(str(tmp_path / "adapter"), tmp_path / "out", base=str(tmp_path / "moved"), merge_lora=True)
    merged = qkv.load(tmp_path / "out")
    assert merged.model.spec.lora is None
    torch.testing.assert_close(logits(tmp_path / "out"), expected)


def test_a_base_that_has_no_hugging_face_form_is_written_next_to_the_adapter(tmp_path: Path) -> None:
    qkv.save(qkv.load(checkpoint(tmp_path / "hf")), tmp_path / "native")
    run = lora_run(tmp_path / "run", tmp_path / "native")
    export_checkpoint(str(run), tmp_path / "adapter", adapter=True)
    (tmp_path / "adapter").rename(tmp_path / "elsewhere")
    assert qkv.load(tmp_path / "elsewhere").model.spec == qkv.load(run).model.spec


def test_a_model_without_lora_weights_has_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(qkv.InputError, match="has no LoRA weights"):
        export_checkpoint(str(checkpoint(tmp_path / "base")), tmp_path / "adapter", adapter=True)


def test_a_merged_model_has_no_adapter(run: Path, tmp_path: Path) -> None:
    with pytest.raises(qkv.InputError, match="exclude each other"):
        export_checkpoint(str(run), tmp_path / "adapter", adapter=True, merge_lora=True)


def test_an_adapter_can_be_fine_tuned_with_another_head(run: Path, tmp_path: Path) -> None:
    export_checkpoint(str(run), tmp_path / "adapter", adapter=True)
    bundle = qkv.load(tmp_path / "adapter", head="token", labels=["x", "y"])
    assert bundle.model.spec.head is not None
    assert bundle.model.spec.head.labels == ("x", "y")
    assert bundle.model.spec.lora is None  # merged, as for a run
