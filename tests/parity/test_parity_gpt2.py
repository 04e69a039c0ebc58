"""GPT-2 against Hugging Face's, tiny and odd: every head, activation, tie and way of scaling; old files too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from both import (
    NEAR,
    Both,
    check_gradients,
    check_logits,
    check_maps,
    check_own_round_trip,
    check_round_trip,
    randomised,
)
from safetensors.torch import load_file, save_file

from qkv.checkpoints import load, save
from qkv.errors import InputError
from qkv.families import gpt2
from qkv.families.hf.format import hf_config_from_spec, spec_from_hf_config
from qkv.nn.construction import build_on_meta

ODD: dict[str, Any] = {
    "vocab_size": 31,
    "n_embd": 35,
    "n_layer": 3,
    "n_head": 5,
    "n_inner": 51,
    "n_positions": 13,
    "num_labels": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LM = "LMHeadModel"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lm": (LM, {}),
    "backbone": ("Model", {}),
    "sequence": ("ForSequenceClassification", {}),
    "regression": ("ForSequenceClassification", {"num_labels": 1}),
    "token": ("ForTokenClassification", {"classifier_dropout": 0.3}),
    "span": ("ForQuestionAnswering", {"num_labels": 2}),
    "untied": (LM, {"tie_word_embeddings": False}),
    "unscaled": (LM, {"scale_attn_weights": False}),
    "scaled by depth": (LM, {"scale_attn_by_inverse_layer_idx": True}),
    "unscaled but by depth": (LM, {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}),
    "hidden is four times the width": (LM, {"n_inner": None}),
    "relu": (LM, {"activation_function": "relu"}),
    "gelu": (LM, {"activation_function": "gelu"}),
    "silu": (LM, {"activation_function": "silu"}),
    "one layer, one head, other epsilon": (LM, {"n_layer": 1, "n_head": 1, "layer_norm_epsilon": 1e-3}),
    "without an end": (LM, {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Both:
    return make(tmp_path, *request.param)


def make(tmp_path: Path, name: str, changes: dict[str, Any]) -> Both:
    config = transformers.GPT2Config(**(ODD | changes))
    return Both(randomised(getattr(transformers, f"GPT2{name}")(config)), tmp_path / "theirs")


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).detach().abs().max())


def test_logits_equal_theirs(both: Both) -> None:
    check_logits(both)


def test_gradients_equal_theirs(both: Both) -> None:
    check_gradients(both)


def test_out_and_in_again_gives_equal_bytes(both: Both, tmp_path: Path) -> None:
    check_own_round_trip(both, tmp_path / "own")
    check_round_trip(both, tmp_path / "again")


def test_captured_maps_equal_eager_attention(tmp_path: Path) -> None:
    check_maps(make(tmp_path, LM, {"scale_attn_by_inverse_layer_idx": True}), attentions="decoder.{i}.self_attention")


def test_reordering_and_upcasting_changes_nothing_in_float32(tmp_path: Path) -> None:
    both = make(tmp_path, LM, {"reorder_and_upcast_attn": True})
    both.theirs.set_attn_implementation("eager")  # the only one that looks at it
    check_logits(both)


def test_two_heads_equal_theirs_and_come_out_again(tmp_path: Path) -> None:
    both = make(tmp_path, "DoubleHeadsModel", {"summary_first_dropout": 0.3})
    source = both.source()
    found = both.their_output(mc_token_ids=source.layout.lengths - 1)
    said, chosen = both.ours.model.forward_with_aux_head(source)
    assert apart(said, found.logits[source.layout.valid_mask()]) <= NEAR
    assert apart(chosen.squeeze(1), found.mc_logits) <= NEAR
    assert both.ours.model.spec.aux_head.dropout == 0.3
    check_own_round_trip(both, tmp_path / "own")
    check_round_trip(both, tmp_path / "again")


def test_the_last_real_token_is_judged_whichever_side_theirs_is_padded_on(tmp_path: Path) -> None:
    both = make(tmp_path, "ForSequenceClassification", {})
    source = both.source()
    real = source.layout.valid_mask().flip(1)
    padded = torch.zeros_like(real, dtype=torch.long).masked_scatter(real, source.values)
    places = (real.cumsum(1) - 1).clamp(min=0)
    left = both.theirs(padded, attention_mask=real.long(), position_ids=places).logits
    assert apart(both.ours.model(source), left) <= NEAR


def test_without_a_padding_token_theirs_takes_the_last_token_of_one_sequence(tmp_path: Path) -> None:
    both = make(tmp_path, "ForSequenceClassification", {"pad_token_id": None})
    ours = both.ours.model(both.source())
    for row, sequence in zip(ours, both.source().sequences(), strict=True):
        assert apart(row, both.theirs(sequence[None]).logits[0]) <= NEAR


def test_a_model_without_an_end_says_so_on_the_way_out(tmp_path: Path) -> None:
    both = make(tmp_path, LM, {"bos_token_id": None, "eos_token_id": None})
    assert (both.ours.model.spec.bos_id, both.ours.model.spec.eos_id) == (-1, -1)
    save(both.ours, tmp_path / "again", "huggingface")
    again = transformers.GPT2Config.from_pretrained(tmp_path / "again")
    assert (again.bos_token_id, again.eos_token_id, again.pad_token_id) == (None, None, 0)


def test_an_old_file_with_masks_without_prefix_and_with_a_copy_of_the_embedding_loads(tmp_path: Path) -> None:
    both = make(tmp_path, LM, {})
    path = both.folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    for layer in range(3):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 13, 13).tril()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, path, {"format": "pt"})
    both.ours = load(both.folder)
    assert both.ours.unexpected_keys == ()
    check_logits(both)


def test_a_tied_file_whose_copy_of_the_embedding_differs_is_refused(tmp_path: Path) -> None:
    both = make(tmp_path, LM, {})
    path = both.folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1}, path, {"format": "pt"})
    with pytest.raises(InputError, match="are one tensor"):
        load(both.folder)


def test_a_file_of_the_body_loads_under_a_new_head_and_says_what_is_fresh(tmp_path: Path) -> None:
    both = make(tmp_path, LM, {})
    bundle = load(both.folder, head="token", labels=["B", "I", "O"])
    assert bundle.missing_keys == ("head.linear.bias", "head.linear.weight")
    assert bundle.model(both.source()).shape == (both.source().layout.num_tokens, 3)


@pytest.mark.parametrize(
    ("key", "value"),
    [("add_cross_attention", True), ("summary_type", "first"), ("activation_function", "mish"), ("n_head", "five")],
)
def test_a_value_that_we_do_not_have_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    both = make(tmp_path, LM, {})
    path = both.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(InputError, match=key):
        load(both.folder)


@pytest.mark.parametrize("dropouts", [{}, {"hidden_dropout": 0.2}, {"hidden_dropout": 0.2, "classifier_dropout": 0.4}])
def test_tokens_are_labelled_behind_their_dropout(tmp_path: Path, dropouts: dict[str, float]) -> None:
    both = make(tmp_path, "ForTokenClassification", dropouts)
    assert both.ours.model.spec.head.dropout == both.theirs.dropout.p


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("small", 124_439_808), ("medium", 354_823_168), ("large", 774_030_080), ("xl", 1_557_611_200)],
)
def test_a_size_has_the_published_models_parameters(size: str, parameters: int) -> None:
    assert sum(p.numel() for p in build_on_meta(gpt2.make_spec(gpt2.PRESETS[size])).parameters()) == parameters


def test_every_default_is_theirs() -> None:
    """A config.json may leave out whatever is at its default."""
    written, _ = hf_config_from_spec(gpt2, spec_from_hf_config(gpt2, {}, "config.json", "lm", ("no", "yes")))
    theirs = transformers.GPT2Config().to_dict() | {"n_inner": 4 * 768}
    for key in written.keys() - {"architectures", "dtype"}:
        assert written[key] == theirs[key], key
