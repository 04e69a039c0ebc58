"""BART against Hugging Face's, tiny and odd: every head, both sides of different shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from both import (
    Both,
    check_gradients,
    check_logits,
    check_maps,
    check_own_round_trip,
    check_round_trip,
    ids,
    randomised,
)

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
    "num_labels": 4,
}
CASES = {
    "seq2seq_lm": ("ForConditionalGeneration", {}),
    "relu": ("ForConditionalGeneration", {"activation_function": "relu"}),
    "gelu_new": ("ForConditionalGeneration", {"activation_function": "gelu_new"}),
    "silu, scaled": ("ForConditionalGeneration", {"activation_function": "silu", "scale_embedding": True}),
    "one layer": ("ForConditionalGeneration", {"encoder_layers": 1, "decoder_layers": 1}),
    "other tokens": (
        "ForConditionalGeneration",
        {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 2, "forced_eos_token_id": 1},
    ),
    "span": ("ForQuestionAnswering", {}),
    "backbone": ("Model", {}),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Both:
    return make(tmp_path, *request.param)


def make(tmp_path: Path, kind: str, changes: dict[str, Any]) -> Both:
    theirs = randomised(getattr(transformers, f"Bart{kind}")(transformers.BartConfig(**(ODD | changes))))
    if hasattr(theirs, "final_logits_bias"):
        theirs.final_logits_bias.normal_()
    return Both(theirs, tmp_path / "theirs")


class Classifier(Both):
    """The target is the source itself, shifted right; what stands at the source's end token is judged."""

    def source(self) -> Ragged:
        drawn = [torch.cat([s, torch.tensor([2])]) for s in ids([4, 9, 1, 6], self.vocabulary, 1).sequences()]
        return Ragged.pack(drawn)

    def target(self) -> Ragged:
        return Ragged.pack([torch.cat([torch.tensor([2]), s[:-1]]) for s in self.source().sequences()])

    def their_output(self, **options: Any) -> Any:
        source = self.source()
        padded, real = source.to_padded(1).long(), source.layout.valid_mask().long()
        return self.theirs(input_ids=padded, attention_mask=real, **options)


@pytest.fixture(params=[4, 1], ids=["classes", "regression"])
def classifier(request: pytest.FixtureRequest, tmp_path: Path) -> Classifier:
    config = transformers.BartConfig(**(ODD | {"num_labels": request.param}))
    return Classifier(randomised(transformers.BartForSequenceClassification(config)), tmp_path / "theirs")


def test_logits_equal_theirs(both: Both) -> None:
    check_logits(both)


def test_gradients_equal_theirs(both: Both) -> None:
    check_gradients(both)


def test_out_and_in_again_gives_equal_bytes(both: Both, tmp_path: Path) -> None:
    check_own_round_trip(both, tmp_path / "own")
    check_round_trip(both, tmp_path / "again")


def test_a_classifier_equals_theirs(classifier: Classifier, tmp_path: Path) -> None:
    check_logits(classifier)
    check_gradients(classifier)
    check_own_round_trip(classifier, tmp_path / "own")
    check_round_trip(classifier, tmp_path / "again")


def test_captured_maps_equal_eager_attention(tmp_path: Path) -> None:
    check_maps(
        make(tmp_path, "ForConditionalGeneration", {}),
        encoder_attentions="encoder.{i}.self_attention",
        decoder_attentions="decoder.{i}.self_attention",
        cross_attentions="decoder.{i}.cross_attention",
    )


def test_every_name_of_the_one_table_may_stand_in_a_checkpoint(tmp_path: Path) -> None:
    both = make(tmp_path, "ForConditionalGeneration", {})
    named = dict(both.theirs.state_dict()) | {"model.encoder.version": torch.tensor([3.0])}
    (both.folder / "model.safetensors").unlink()
    torch.save(named, both.folder / "pytorch_model.bin")
    both.ours = load(both.folder)
    check_logits(both)


def test_a_second_table_that_differs_is_refused(tmp_path: Path) -> None:
    both = make(tmp_path, "ForConditionalGeneration", {})
    named = dict(both.theirs.state_dict()) | {"model.decoder.embed_tokens.weight": torch.zeros(31, 30)}
    (both.folder / "model.safetensors").unlink()
    torch.save(named, both.folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"decoder\.embed_tokens.*differ"):
        load(both.folder)


def test_a_body_writes_under_the_generation_head(tmp_path: Path) -> None:
    both = make(tmp_path, "Model", {})
    bundle = load(both.folder, head="seq2seq_lm")
    assert bundle.missing_keys == ("head.final_logits_bias",)  # the output's weight is the table, which is there
    with torch.no_grad():
        theirs = both.their_logits() @ both.theirs.shared.weight.T
        assert float((bundle.model(both.source(), both.target()) - theirs).abs().max()) <= 1e-4


def test_a_decoder_alone_is_refused_by_name(tmp_path: Path) -> None:
    transformers.BartForCausalLM(transformers.BartConfig(**ODD)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="BartForCausalLM"):
        load(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("tie_word_embeddings", False), ("encoder_layerdrop", 0.1)])
def test_a_config_value_that_we_lack_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    both = make(tmp_path, "ForConditionalGeneration", {})
    config = json.loads((both.folder / "config.json").read_text())
    (both.folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(InputError, match=key):
        load(both.folder)


def test_sizes_are_those_of_the_checkpoints() -> None:
    from qkv.families import bart
    from qkv.nn.construction import build_on_meta

    counts = {
        name: sum(p.numel() for p in build_on_meta(bart.make_spec(shape)).parameters())
        for name, shape in bart.PRESETS.items()
    }
    assert counts == {"base": 139_420_416, "large": 406_291_456}
