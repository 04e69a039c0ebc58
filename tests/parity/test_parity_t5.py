"""T5 and its 1.1 form against Hugging Face's, tiny and odd: every head, gate and tie."""

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
from torch import nn
from transformers.models.t5.modeling_t5 import T5Attention

from qkv import spec
from qkv.checkpoints import ModelBundle, load, save
from qkv.errors import InputError
from qkv.families import t5
from qkv.nn import Encoder, Ragged
from qkv.nn.construction import build_on_meta
from qkv.nn.position import RelativePositionBias

ODD: dict[str, Any] = {
    "vocab_size": 31,
    "d_model": 26,
    "d_kv": 7,  # so that heads and width have nothing to do with each other
    "d_ff": 51,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 5,
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 7,  # shorter than the sequences
    "num_labels": 4,
    "decoder_start_token_id": 0,
}
GENERATION = "ForConditionalGeneration"
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
ENCODER = {"num_decoder_layers": 3}  # of a decoder that is not there
CASES = {
    "seq2seq_lm": (GENERATION, {}),
    "1.1": (GENERATION, GATED),
    "gated-silu": (GENERATION, {"feed_forward_proj": "gated-silu"}),
    "gelu": (GENERATION, {"feed_forward_proj": "gelu"}),
    "gelu_new": (GENERATION, {"feed_forward_proj": "gelu_new"}),
    "silu": (GENERATION, {"feed_forward_proj": "silu"}),
    "one layer, many buckets": (
        GENERATION,
        {"num_layers": 1, "num_decoder_layers": 1}
        | {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 20},
    ),
    "other epsilon and tokens": (GENERATION, {"layer_norm_epsilon": 1e-2, "eos_token_id": 2}),
    "span": ("ForQuestionAnswering", {"num_labels": 2}),
    "token": ("ForTokenClassification", ENCODER),
    "gated token": ("ForTokenClassification", ENCODER | {"feed_forward_proj": "gated-gelu"}),
    "encoder": ("EncoderModel", ENCODER),
    "backbone": ("Model", {}),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Both:
    return make(tmp_path, *request.param)


def make(tmp_path: Path, kind: str, changes: dict[str, Any]) -> Both:
    theirs = getattr(transformers, f"T5{kind}")(transformers.T5Config(**(ODD | changes)))
    if changes.get("tie_word_embeddings") is False:  # which theirs ties all the same, until it loads a file
        theirs.lm_head.weight = nn.Parameter(torch.zeros_like(theirs.lm_head.weight))
    return Both(randomised(theirs, 0.4), tmp_path / "theirs")


class Classifier(Both):
    """The target is the source itself, shifted right; what stands at the source's end token is judged."""

    def source(self) -> Ragged:
        drawn = [torch.cat([s, torch.tensor([1])]) for s in ids([4, 9, 1, 6], self.vocabulary, 1).sequences()]
        return Ragged.pack(drawn)

    def target(self) -> Ragged:
        return Ragged.pack([torch.cat([torch.tensor([0]), s[:-1]]) for s in self.source().sequences()])

    def their_output(self, **options: Any) -> Any:
        source = self.source()
        padded, real = source.to_padded(0).long(), source.layout.valid_mask().long()
        return self.theirs(input_ids=padded, attention_mask=real, **options)


@pytest.fixture(params=[4, 1], ids=["classes", "regression"])
def classifier(request: pytest.FixtureRequest, tmp_path: Path) -> Classifier:
    config = transformers.T5Config(**(ODD | {"num_labels": request.param}))
    return Classifier(randomised(transformers.T5ForSequenceClassification(config)), tmp_path / "theirs")


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
        make(tmp_path, GENERATION, {}),
        encoder_attentions="encoder.{i}.self_attention",
        decoder_attentions="decoder.{i}.self_attention",
        cross_attentions="decoder.{i}.cross_attention",
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 64), (6, 7), (33, 100)])
def test_buckets_equal_theirs_at_every_distance(buckets: int, distance: int, causal: bool) -> None:
    relative = RelativePositionBias(spec.RelativePositionBias(num_buckets=buckets, max_distance=distance), 1, causal)
    places = torch.arange(-2000, 2001)[None]
    theirs = T5Attention._relative_position_bucket(places, not causal, buckets, distance)
    assert torch.equal(relative.compute_bucket(places), theirs)


def rewritten(both: Both, drop: tuple[str, ...] = (), **values: Any) -> Path:
    config = json.loads((both.folder / "config.json").read_text()) | values
    (both.folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in drop}))
    return both.folder


def test_a_1_1_config_of_before_transformers_5_is_untied_and_unscaled(tmp_path: Path) -> None:
    both = make(tmp_path, GENERATION, GATED)
    derived = ("scale_decoder_outputs", "dense_act_fn", "is_gated_act")
    both.ours = load(rewritten(both, derived, tie_word_embeddings=False))
    assert both.ours.model.spec.head == spec.Head(kind="lm", d_model=26, num_outputs=31)
    check_logits(both)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_tie_and_scale_are_read_apart_and_written_again(tmp_path: Path, tied: bool, scaled: bool) -> None:
    both = make(tmp_path, GENERATION, {} if tied else {"tie_word_embeddings": False})
    both.theirs.config.scale_decoder_outputs = scaled
    both.theirs.save_pretrained(both.folder)
    both.ours = load(both.folder)
    head = both.ours.model.spec.head
    assert head is not None
    assert (head.tie_embeddings, head.input_scale == 1.0) == (tied, not scaled)
    check_logits(both)
    check_round_trip(both, tmp_path / "again")


def test_a_checkpoint_of_the_first_release_is_read(tmp_path: Path) -> None:
    """With every name of the one table, and a bias that nothing ever read."""
    both = make(tmp_path, GENERATION, {})
    unread = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.zeros(6, 5)}
    (both.folder / "model.safetensors").unlink()
    torch.save(dict(both.theirs.state_dict()) | unread, both.folder / "pytorch_model.bin")
    derived = ("scale_decoder_outputs", "dense_act_fn", "is_gated_act", "tie_word_embeddings", "feed_forward_proj")
    both.ours = load(rewritten(both, derived, n_positions=512))
    check_logits(both)


def test_the_encoder_of_a_whole_model_may_be_loaded_alone(tmp_path: Path) -> None:
    both = make(tmp_path, GENERATION, {})
    bundle = load(both.folder, head="encoder")
    assert isinstance(bundle.model, Encoder)
    assert not bundle.missing_keys
    assert any(name.startswith("decoder.") for name in bundle.unexpected_keys)
    source = both.source()
    whole = both.ours.model.encode(source).hidden.values
    torch.testing.assert_close(bundle.model(source), whole)


def test_an_unknown_activation_is_refused_by_name(tmp_path: Path) -> None:
    both = make(tmp_path, GENERATION, {})
    with pytest.raises(InputError, match="quick_gelu"):
        load(rewritten(both, ("dense_act_fn",), feed_forward_proj="gated-quick_gelu"))


def test_a_gate_by_the_exact_gelu_is_not_written_as_theirs(tmp_path: Path) -> None:
    shape = spec.replace(t5.PRESETS["small"], d_model=8, heads=2, layers=1, d_ff=8, gated=True, activation="gelu")
    model = build_on_meta(t5.make_spec(shape, source_vocab_size=9, target_vocab_size=9))
    with pytest.raises(InputError, match="exact GELU"):
        save(ModelBundle(model), tmp_path, "huggingface")
    assert not list(tmp_path.iterdir())


def test_sizes_are_those_of_the_checkpoints() -> None:
    counts = {
        name: sum(p.numel() for p in build_on_meta(t5.make_spec(shape)).parameters())
        for name, shape in t5.PRESETS.items()
    }
    assert counts == {
        "small": 60_506_624,
        "base": 222_903_552,
        "large": 737_668_096,
        "3b": 2_851_598_336,
        "11b": 11_307_321_344,
        "v1.1-small": 76_961_152,
        "v1.1-base": 247_577_856,
        "v1.1-large": 783_150_080,
        "v1.1-xl": 2_849_757_184,
        "v1.1-xxl": 11_135_332_352,
    }
