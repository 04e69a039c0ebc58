"""Marian against Hugging Face's, tiny and odd: one table and two, tied and untied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from both import (
    TARGET_LENGTHS,
    Both,
    check_gradients,
    check_logits,
    check_maps,
    check_own_round_trip,
    check_round_trip,
    ids,
    randomised,
)

from qkv import checkpoints
from qkv.checkpoints import load
from qkv.errors import InputError
from qkv.nn import Ragged

ODD: dict[str, Any] = {
    "vocab_size": 31,
    "d_model": 30,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 5,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 51,
    "decoder_ffn_dim": 37,
    "max_position_embeddings": 13,
    "activation_function": "silu",
    "scale_embedding": True,
    "pad_token_id": 29,
    "decoder_start_token_id": 29,
}
APART = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 41}
CASES = {
    "as the real ones": {},
    "unscaled, gelu": {"scale_embedding": False, "activation_function": "gelu"},
    "relu, one layer": {"activation_function": "relu", "encoder_layers": 1, "decoder_layers": 1},
    "an odd width": {"d_model": 15},
    "two tables": APART,
    "two tables, untied": APART | {"tie_word_embeddings": False},
    "another end": {"eos_token_id": 1, "forced_eos_token_id": 1},
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Both:
    return make(tmp_path, request.param)


class Translation(Both):
    """Targets begin with the padding token, as they do in use, and have a vocabulary of their own."""

    def target(self) -> Ragged:
        drawn = ids(TARGET_LENGTHS, self.theirs.config.decoder_vocab_size, 2).sequences()
        start = torch.tensor([self.theirs.config.decoder_start_token_id])
        return Ragged.pack([torch.cat([start, s[1:]]) for s in drawn])


def make(tmp_path: Path, changes: dict[str, Any], kind: str = "MTModel") -> Both:
    theirs = randomised(getattr(transformers, f"Marian{kind}")(transformers.MarianConfig(**(ODD | changes))))
    body = theirs.model if kind == "MTModel" else theirs
    for side in (body.encoder, body.decoder):  # which are no parameters, but are drawn as if they were
        side.embed_positions.weight.data = side.embed_positions.create_weight()
    if kind == "MTModel":
        theirs.final_logits_bias.normal_()
    return Translation(theirs, tmp_path / "theirs")


def test_logits_equal_theirs(both: Both) -> None:
    check_logits(both)


def test_gradients_equal_theirs(both: Both) -> None:
    check_gradients(both)


def test_out_and_in_again_gives_equal_bytes(both: Both, tmp_path: Path) -> None:
    check_own_round_trip(both, tmp_path / "own")
    check_round_trip(both, tmp_path / "again")


@pytest.mark.parametrize("changes", [{}, APART], ids=["one table", "two tables"])
def test_the_body_equals_theirs_and_goes_out_and_in(tmp_path: Path, changes: dict[str, Any]) -> None:
    both = make(tmp_path, changes, "Model")
    check_logits(both)
    check_own_round_trip(both, tmp_path / "own")
    checkpoints.save(
        both.ours, tmp_path / "again", "huggingface"
    )  # theirs writes its sinusoids too, ours leaves them out
    both.theirs, info = transformers.MarianModel.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert {name.rpartition(".embed_positions")[1] for name in info["missing_keys"]} <= {".embed_positions"}
    assert not info["unexpected_keys"]
    check_logits(both)


def test_captured_maps_equal_eager_attention(tmp_path: Path) -> None:
    check_maps(
        make(tmp_path, {}),
        encoder_attentions="encoder.{i}.self_attention",
        decoder_attentions="decoder.{i}.self_attention",
        cross_attentions="decoder.{i}.cross_attention",
    )


def test_every_name_of_the_one_table_may_stand_in_a_checkpoint(tmp_path: Path) -> None:
    both = make(tmp_path, {})
    (both.folder / "model.safetensors").unlink()
    torch.save(dict(both.theirs.state_dict()), both.folder / "pytorch_model.bin")  # with sinusoids and all
    both.ours = load(both.folder)
    check_logits(both)


def changed(both: Both, **values: Any) -> Path:
    config = json.loads((both.folder / "config.json").read_text())
    (both.folder / "config.json").write_text(json.dumps(config | values))
    return both.folder


def test_a_config_as_it_is_given_away_is_read(tmp_path: Path) -> None:
    """With the words of today's and of older ones."""
    both = make(tmp_path, {})
    said = {"activation_function": "swish", "bad_words_ids": [[29]], "normalize_before": False, "_num_labels": 3}
    both.ours = load(changed(both, static_position_embeddings=True, normalize_embedding=False, **said))
    check_logits(both)


def test_the_padding_token_begins_a_target_and_is_never_written(tmp_path: Path) -> None:
    both = make(tmp_path, {})
    assert (both.ours.model.spec.bos_id, both.ours.model.spec.suppress_tokens) == (29, (29,))
    checkpoints.save(both.ours, tmp_path / "again", "huggingface")
    again = transformers.MarianMTModel.from_pretrained(tmp_path / "again")
    assert again.generation_config.bad_words_ids == [[29]]
    assert again.generation_config.renormalize_logits
    assert again.generation_config.decoder_start_token_id == again.generation_config.pad_token_id == 29


@pytest.mark.parametrize(
    ("key", "value"), [("bad_words_ids", [[29], [3, 4]]), ("decoder_start_token_id", 3), ("tie_word_embeddings", False)]
)
def test_a_config_value_that_we_lack_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(InputError, match=key if key != "tie_word_embeddings" else "tied"):
        load(changed(make(tmp_path, {}), **{key: value}))


def test_a_decoder_alone_is_refused_by_name(tmp_path: Path) -> None:
    transformers.MarianForCausalLM(transformers.MarianConfig(**ODD)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="MarianForCausalLM"):
        load(tmp_path)


def test_the_size_is_that_of_the_checkpoints_that_are_given_away() -> None:
    from qkv.families import marian
    from qkv.nn.construction import build_on_meta

    assert sum(p.numel() for p in build_on_meta(marian.make_spec(marian.PRESETS["opus"])).parameters()) == 73_886_208
