"""A damaged, foreign or dangerous checkpoint is refused in one line that names what is wrong; nothing runs, nothing is
guessed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint
from safetensors.torch import load_file, save_file

import qkv


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "bert")


def must_refuse(folder: str | Path, *said: str, **options: Any) -> None:
    with pytest.raises(qkv.InputError) as found:
        qkv.load(folder, **options)
    message = str(found.value)
    assert "\n" not in message
    assert all(part in message for part in said), message


def change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_key_that_no_rule_takes(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"bert.encoder.layer.0.attention.self.alibi": torch.zeros(2)}))
    must_refuse(folder, "bert.encoder.layer.0.attention.self.alibi", "no rule")


def test_a_key_that_is_missing(folder: Path) -> None:
    rewrite(folder, lambda t: t.pop("bert.encoder.layer.1.output.dense.weight"))
    must_refuse(folder, "lacks 'encoder.blocks.1.feedforward.down.weight'")


def test_a_layer_more_than_the_config_says(folder: Path) -> None:
    change(folder, num_hidden_layers=1)
    must_refuse(folder, "holds 'encoder.blocks.1.")


def test_a_shape_that_differs(folder: Path) -> None:
    change(folder, intermediate_size=17)
    must_refuse(folder, "feedforward.up.", "and this model needs [17")


def test_a_missing_shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = list(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, keys in halves.items():
        save_file({key: tensors[key] for key in keys}, folder / file)
    index = {"weight_map": {key: file for file, keys in halves.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    assert qkv.load(folder).missing_keys == ()  # whole: the shards load
    (folder / "model-00002-of-00002.safetensors").unlink()
    must_refuse(folder, "model-00002-of-00002.safetensors", "shard is missing")


def test_a_shard_outside_the_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    must_refuse(folder, "is not a file name in the same folder")


def test_an_index_without_a_map(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")
    must_refuse(folder, "weight_map")


@pytest.mark.parametrize("value", ["mish", 3, None, [1]])
def test_an_activation_that_we_do_not_have(folder: Path, value: Any) -> None:
    change(folder, hidden_act=value)
    if value is None:  # not said: theirs is gelu then
        assert qkv.load(folder).model.spec.encoder.block.feedforward.activation == "gelu"
    else:
        must_refuse(folder, "hidden_act", str(value))


def test_a_config_value_that_we_do_not_know(folder: Path) -> None:
    change(folder, position_embedding_type="relative_key")
    must_refuse(folder, "position_embedding_type", "relative_key")


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "layer_norm_eps", "tie_word_embeddings"])
def test_a_config_value_of_the_wrong_kind(folder: Path, key: str) -> None:
    change(folder, **{key: "many"})
    must_refuse(folder, "config.json", key, "'many'")


def test_a_width_that_the_heads_do_not_divide(folder: Path) -> None:
    change(folder, num_attention_heads=5)
    must_refuse(folder, "12", "5 heads")


def test_a_family_that_we_do_not_have(folder: Path) -> None:
    change(folder, model_type="mamba")
    must_refuse(folder, "model_type 'mamba'")


def test_an_architecture_that_we_do_not_have(folder: Path) -> None:
    change(folder, architectures=["BertLMHeadModel"])
    must_refuse(folder, "BertLMHeadModel")


def test_a_head_that_the_family_does_not_have(folder: Path) -> None:
    must_refuse(folder, "seq2seq_lm", head="seq2seq_lm")


def test_a_config_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    must_refuse(folder, "config.json", "not JSON")


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    must_refuse(folder, "has no weights")


def test_a_truncated_weight_file(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    must_refuse(folder, "model.safetensors", "damaged")


class Dangerous:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/qkv_pickle_ran",)


def test_a_pickle_with_code_in_it_is_not_run(folder: Path) -> None:
    Path("/tmp/qkv_pickle_ran").unlink(missing_ok=True)
    (folder / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(1), "b": Dangerous()}, folder / "pytorch_model.bin")
    must_refuse(folder, "pytorch_model.bin", "can run code")
    assert not Path("/tmp/qkv_pickle_ran").exists()


def test_a_pickle_of_something_else(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"epoch": 3}, folder / "pytorch_model.bin")
    must_refuse(folder, "pytorch_model.bin", "more than named tensors")


def test_an_empty_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    must_refuse(folder, "pytorch_model.bin", "damaged")


@pytest.mark.parametrize("old", [True, False])
def test_an_old_bin_loads_as_the_safetensors_did(folder: Path, old: bool) -> None:
    before = qkv.load(folder).model.state_dict()
    tensors = load_file(folder / "model.safetensors")
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
    (folder / "model.safetensors").unlink()
    after = qkv.load(folder).model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_names_of_tensorflow_days_load(folder: Path) -> None:
    before = qkv.load(folder).model.state_dict()

    def old(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if "LayerNorm" in n]:
            tensors[name.replace("weight", "gamma").replace("bias", "beta")] = tensors.pop(name)

    rewrite(folder, old)
    after = qkv.load(folder).model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_checkpoint_in_half_precision_computes_in_float32(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({name: tensor.half() for name, tensor in t.items()}))
    assert {p.dtype for p in qkv.load(folder).model.parameters()} == {torch.float32}


def test_a_name_that_nobody_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    must_refuse("nobody/nothing", "nobody/nothing", "not in the Hugging Face cache")


def test_a_name_in_the_local_cache_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--our--bert"
    checkpoint(home / "snapshots" / "abc")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc")
    assert qkv.load("our/bert").model.spec.family == "bert"


def test_a_tokeniser_larger_than_the_embedding(folder: Path) -> None:
    with (folder / "vocab.txt").open("a") as file:
        file.write("more\n")
    must_refuse(folder, "has 16 tokens, the model 15")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"load_in_8bit": True}),
        ("pruned_heads", {"0": [1]}),
        ("hidden_size", -4),
        ("hidden_size", 0),
        ("layer_norm_eps", -1.0),
    ],
)
def test_a_config_value_that_changes_the_mathematics_is_named(folder: Path, key: str, value: Any) -> None:
    change(folder, **{key: value})
    must_refuse(folder, "config.json", key)


@pytest.mark.parametrize("names", [{"a": "x", "b": "y"}, {"0": "x", "5": "y"}])
def test_labels_that_are_not_numbered_through(folder: Path, names: dict[str, str]) -> None:
    change(folder, id2label=names)
    must_refuse(folder, "id2label")


def test_weights_that_are_no_floating_point_numbers(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"cls.predictions.bias": torch.zeros(15, dtype=torch.int8)}))
    must_refuse(folder, "torch.int8")


def test_another_tasks_last_layer_does_not_become_the_new_heads(tmp_path: Path) -> None:
    checkpoint(tmp_path / "tagger", "token")
    bundle = qkv.load(tmp_path / "tagger", head="sequence", labels=["a", "b", "c"])
    assert {"head.linear.bias", "head.linear.weight"} <= set(bundle.missing_keys)
    assert set(bundle.unexpected_keys) == {"classifier.bias", "classifier.weight"}


def test_other_labels_give_a_fresh_last_layer_and_as_many_keep_it(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "judge", "sequence")
    assert qkv.load(folder, head="sequence", labels=["a", "b"]).missing_keys == (
        "head.linear.bias",
        "head.linear.weight",
    )
    renamed = qkv.load(folder, head="sequence", labels=["a", "b", "c"])
    assert (renamed.missing_keys, renamed.model.spec.head.labels) == ((), ("a", "b", "c"))


@pytest.mark.parametrize("first", ["qkv", "huggingface"])
@pytest.mark.parametrize("second", ["qkv", "huggingface"])
def test_a_model_is_not_written_among_anothers_files(folder: Path, tmp_path: Path, first: Any, second: Any) -> None:
    one, other = qkv.load(folder), qkv.load(checkpoint(tmp_path / "other", "sequence"))
    qkv.save(one, tmp_path / "out", first)
    qkv.save(one, tmp_path / "out", first)  # itself it may replace
    with pytest.raises(qkv.InputError, match="holds another model"):
        qkv.save(other, tmp_path / "out", second)
    assert qkv.load(tmp_path / "out").model.spec == one.model.spec
