"""GPT (openai-gpt) against Hugging Face's, tiny and odd: every head, activation and tie; old files too."""

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
from qkv.families import gpt
from qkv.families.hf.format import hf_config_from_spec, spec_from_hf_config
from qkv.nn.construction import build_on_meta

ODD: dict[str, Any] = {
    "vocab_size": 31,
    "n_embd": 35,
    "n_layer": 3,
    "n_head": 5,
    "n_positions": 13,
    "num_labels": 4,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LM = "LMHeadModel"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lm": (LM, {}),
    "backbone": ("Model", {}),
    "sequence": ("ForSequenceClassification", {}),
    "regression": ("ForSequenceClassification", {"num_labels": 1}),
    "untied": (LM, {"tie_word_embeddings": False}),
    "relu": (LM, {"afn": "relu"}),
    "silu": (LM, {"afn": "silu"}),
    "one layer, one head, other epsilon": (LM, {"n_layer": 1, "n_head": 1, "layer_norm_epsilon": 1e-3}),
    "all dropouts apart": (LM, {"resid_pdrop": 0.2, "embd_pdrop": 0.3, "attn_pdrop": 0.4}),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Both:
    return make(tmp_path, *request.param)


def make(tmp_path: Path, name: str, changes: dict[str, Any]) -> Both:
    config = transformers.OpenAIGPTConfig(**(ODD | changes))
    return Both(randomised(getattr(transformers, f"OpenAIGPT{name}")(config)), tmp_path / "theirs")


def test_logits_equal_theirs(both: Both) -> None:
    check_logits(both)


def test_gradients_equal_theirs(both: Both) -> None:
    check_gradients(both)


def test_out_and_in_again_gives_equal_bytes(both: Both, tmp_path: Path) -> None:
    check_own_round_trip(both, tmp_path / "own")
    check_round_trip(both, tmp_path / "again")


def test_captured_maps_equal_eager_attention(tmp_path: Path) -> None:
    check_maps(make(tmp_path, LM, {}), attentions="decoder.{i}.self_attention")


def test_what_they_call_gelu_is_its_tanh_approximation(tmp_path: Path) -> None:
    assert make(tmp_path, LM, {}).ours.model.spec.decoder.block.feedforward.activation == "gelu_tanh"


@pytest.mark.parametrize("tied", [True, False])
def test_two_heads_equal_theirs_and_come_out_again(tmp_path: Path, tied: bool) -> None:
    both = make(tmp_path, "DoubleHeadsModel", {"tie_word_embeddings": tied, "summary_first_dropout": 0.3})
    source = both.source()
    found = both.their_output(mc_token_ids=source.layout.lengths - 1)
    said, chosen = both.ours.model.forward_with_aux_head(source)
    assert float((said - found.logits[source.layout.valid_mask()]).detach().abs().max()) <= NEAR
    assert float((chosen.squeeze(1) - found.mc_logits).detach().abs().max()) <= NEAR
    check_own_round_trip(both, tmp_path / "own")
    save(both.ours, tmp_path / "again", "huggingface")
    again, info = type(both.theirs).from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    # of the tied pair they write the head's name and we the embedding's: what they read is equal, tensor by tensor
    theirs, after = both.theirs.state_dict(), again.state_dict()
    assert theirs.keys() == after.keys()
    assert all(torch.equal(theirs[name], after[name]) for name in theirs)
    assert again.config.summary_first_dropout == 0.3


def test_an_old_file_with_masks_and_without_prefix_loads(tmp_path: Path) -> None:
    both = make(tmp_path, LM, {})
    path = both.folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    tensors |= {"lm_head.weight": tensors["tokens_embed.weight"].clone(), "position_ids": torch.arange(13)}
    tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 13, 13).tril() for layer in range(3)}
    save_file(tensors, path, {"format": "pt"})
    both.ours = load(both.folder)
    assert both.ours.unexpected_keys == ()
    check_logits(both)


@pytest.mark.parametrize(
    ("key", "value"), [("afn", "gelu_new"), ("summary_type", "first"), ("summary_activation", "tanh")]
)
def test_a_value_that_we_do_not_have_is_refused_by_name(tmp_path: Path, key: str, value: str) -> None:
    both = make(tmp_path, LM, {})
    path = both.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(InputError, match=key):
        load(both.folder)


def test_the_size_has_the_published_models_parameters() -> None:
    assert sum(p.numel() for p in build_on_meta(gpt.make_spec(gpt.PRESETS["base"])).parameters()) == 116_534_784


def test_every_default_is_theirs() -> None:
    """A config.json may leave out whatever is at its default."""
    written, _ = hf_config_from_spec(gpt, spec_from_hf_config(gpt, {}, "config.json", "lm", ("no", "yes")))
    theirs = transformers.OpenAIGPTConfig().to_dict()
    for key in written.keys() - {"architectures", "dtype"}:
        assert written[key] == theirs[key], key
