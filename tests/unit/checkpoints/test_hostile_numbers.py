"""Numbers of a foreign config.json and of a spec.json: types, ranges and agreement, before anything is built."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint

import qkv
from qkv import families, spec
from qkv.checkpoints.state import check_layer_count
from qkv.nn import build
from qkv.spec.check import check_memory

SIZES: dict[str, dict[str, Any]] = {  # family -> sizes of a tiny model
    "bart": {"d_model": 8, "heads": 2, "decoder_heads": 2, "layers": 1, "decoder_layers": 1, "d_ff": 8},
    "gpt2": {"d_model": 8, "heads": 2, "layers": 1, "max_length": 8},
    "t5": {"d_model": 8, "heads": 2, "d_kv": 4, "layers": 1, "d_ff": 8},
    "vit": {"d_model": 8, "heads": 2, "layers": 1, "d_ff": 8, "image_size": 4, "patch_size": 2},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a checkpoint folder of each family in Hugging Face's format, and one of BERT with a classifier."""
    root = tmp_path_factory.mktemp("hostile")
    for name, sizes in SIZES.items():
        module = families.get_family(name)
        vocab = {} if name == "vit" else {"target_vocab_size": 9}
        vocab |= {"source_vocab_size": 9} if name in ("bart", "t5") else {}
        config = module.Config(**sizes | ({"decoder_d_ff": 8} if name == "bart" else {}))
        qkv.save(qkv.ModelBundle(build(module.make_spec(config, **vocab))), root / name, "huggingface")
    checkpoint(root / "bert", "sequence")
    return {folder.name: folder for folder in root.iterdir()}


def refusal(folder: Path, changes: dict[str, Any], file: str = "config.json") -> str:
    """Return the one line that refuses a folder with changes in its config, which are undone."""
    original = (folder / file).read_text()
    content = json.loads(original)
    for path, value in changes.items():
        *parents, key = path.split(".")
        section = content
        for parent in parents:
            section = section[parent]
        section[key] = value
    (folder / file).write_text(json.dumps(content))
    start = time.monotonic()
    try:
        with pytest.raises(qkv.InputError) as error:
            qkv.load(folder)
    finally:
        (folder / file).write_text(original)
    assert time.monotonic() - start < 1
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    return str(error.value)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("gpt2", "n_layer", 10_000),
        ("gpt2", "n_layer", 10**9),
        ("bart", "encoder_layers", 900),
        ("bart", "decoder_layers", 10_000),
        ("bert", "hidden_size", 10**12),
        ("gpt2", "n_positions", 2**63),
        ("t5", "d_ff", 10**29),
        ("vit", "image_size", 10**6),
        ("vit", "patch_size", 10**6),
        ("t5", "relative_attention_num_buckets", 1),
    ],
)
def test_a_size_that_the_tensors_do_not_have_is_refused_before_anything_is_built(
    folders: dict[str, Path], family: str, key: str, value: int
) -> None:
    message = refusal(folders[family], {key: value})
    assert key in message or "layers" in message or "buckets" in message


@pytest.mark.parametrize("value", [-1, 0, True, 3.0, "3", [3], {"a": 3}])
@pytest.mark.parametrize(("family", "key"), [("gpt2", "n_inner"), ("t5", "num_decoder_layers"), ("t5", "d_kv")])
def test_a_number_of_the_wrong_type_is_refused_in_optional_fields_too(
    folders: dict[str, Path], family: str, key: str, value: Any
) -> None:
    assert f"{key} cannot be" in refusal(folders[family], {key: value})


@pytest.mark.parametrize("value", [10**9, 2**24, -1, 0, True, "3", 2.0])
def test_a_number_of_labels_without_outputs_is_refused(folders: dict[str, Path], value: Any) -> None:
    assert "num_labels" in refusal(folders["bert"], {"num_labels": value, "id2label": None})


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("bart", "decoder_start_token_id", -1),
        ("bart", "decoder_start_token_id", 10**9),
        ("bart", "eos_token_id", 9),
        ("bart", "pad_token_id", 9),
        ("t5", "eos_token_id", 2**63),
        ("t5", "eos_token_id", [1, 2]),
        ("gpt2", "eos_token_id", 9),
        ("gpt2", "bos_token_id", -2),
        ("gpt2", "pad_token_id", 9),
    ],
)
def test_an_id_outside_the_vocabulary_is_refused_at_load(
    folders: dict[str, Path], family: str, key: str, value: Any
) -> None:
    assert key in refusal(folders[family], {key: value})


def test_the_end_of_text_that_transformers_makes_up_for_a_small_vocabulary_is_no_token(
    folders: dict[str, Path],
) -> None:
    config = json.loads((folders["gpt2"] / "config.json").read_text())
    made_up = json.dumps(config | {"bos_token_id": 50256, "eos_token_id": 50256})
    (folders["gpt2"] / "config.json").write_text(made_up)
    model_spec = qkv.load(folders["gpt2"]).model.spec
    (folders["gpt2"] / "config.json").write_text(json.dumps(config))
    assert (model_spec.bos_id, model_spec.eos_id) == (-1, -1)


def test_layers_are_counted_by_the_names_in_the_file() -> None:
    model_spec = families.get_family("gpt2").make_spec(families.get_family("gpt2").Config(layers=3))
    names = ["decoder.blocks.0.norm.weight", "decoder.blocks.1.norm.weight"]
    with pytest.raises(qkv.InputError, match=r"lacks 'decoder\.blocks\.2'; this model has 3 layers"):
        check_layer_count(model_spec, names, "here")


@pytest.fixture
def native(tmp_path: Path) -> Path:
    qkv.save(qkv.load(checkpoint(tmp_path / "hf", "sequence")), tmp_path / "native")
    return tmp_path / "native"


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        ("type", ["Model"], "unknown type"),
        ("head.type", {"a": 1}, "unknown type"),
        ("head.labels", ["a"], "head.labels: has 1 names, and the head 3 outputs"),
        ("head.num_outputs", 4, "head.labels"),
        ("source_embedding.d_model", 0, "it must be 1 or more"),
        ("source_embedding.d_model", 13, "must be equal"),
        ("encoder.block.self_attention.head_dim", -1, "it must be 1 or more"),
        ("encoder.block.self_attention.heads", 5, "does not divide into 5 heads"),
        ("encoder.num_layers", 1000, "1000 layers"),
        ("encoder.block.feedforward.d_model", 6, "must be equal"),
        ("encoder.block.dropout", 1.5, "below 1"),
        ("encoder.block.norm.eps", -1.0, "from 0 to 1"),
        ("encoder", None, "neither an encoder nor a decoder"),
        ("source_embedding", None, "no source_embedding"),
        ("source_embedding.max_length", 2**63, "QKV_LIMIT_VOCABULARY"),
    ],
)
def test_a_spec_is_validated_as_a_whole(native: Path, path: str, value: Any, part: str) -> None:
    assert part in refusal(native, {path: value}, "spec.json")


def test_a_spec_with_deep_nesting_or_a_long_number_is_one_line(native: Path) -> None:
    for text in ("[" * 10_000, '{"type": "Model", "bos_id": ' + "9" * 5_000 + "}"):
        (native / "spec.json").write_text(text)
        with pytest.raises(qkv.InputError, match=r"spec\.json"):
            qkv.load(native)


def test_an_image_processor_of_another_size_than_the_model_is_refused(folders: dict[str, Path]) -> None:
    (folders["vit"] / "preprocessor_config.json").write_text('{"size": {"height": 8, "width": 8}}')
    with pytest.raises(qkv.InputError, match="makes images of 8 x 8 pixels, and the model reads 4 x 4"):
        qkv.load(folders["vit"])
    (folders["vit"] / "preprocessor_config.json").unlink()


def test_a_model_larger_than_the_memory_is_refused_before_it_is_built() -> None:
    gpt2 = families.get_family("gpt2")
    with pytest.raises(qkv.InputError, match=r"at least [0-9,]+ parameters, .* this machine has"):
        build(gpt2.make_spec(gpt2.Config(d_model=2**18, heads=2**10, layers=1000)))


def test_a_sinusoidal_table_is_limited_because_it_is_computed_at_load() -> None:
    transformer = families.get_family("transformer")
    model_spec = transformer.make_spec(transformer.Config(max_length=2**23))
    with pytest.raises(qkv.InputError, match="QKV_LIMIT_POSITION_TABLE"):
        build(model_spec)


def test_the_parameters_that_the_memory_check_counts_are_nearly_all() -> None:
    from qkv.nn.construction import build_on_meta
    from qkv.spec.check import min_parameters

    for name in ("bert", "gpt2", "t5", "bart", "vit", "rnn"):
        module = families.get_family(name)
        model_spec: spec.Model = module.make_spec(next(iter(module.PRESETS.values())))
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in build_on_meta(model_spec).parameters())
        assert 0.7 < min_parameters(model_spec) / count <= 1
        check_memory(spec.replace(model_spec))
