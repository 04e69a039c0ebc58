"""What a head reads of its body's layers, and a body that stays as it is."""

from __future__ import annotations

import pytest
import torch
from test_adapter import BERT, SPECS, logits, texts

from qkv import spec
from qkv.errors import InputError
from qkv.families import bert, rnn
from qkv.nn import build
from qkv.nn.construction import set_features_and_lora


def reading(s: spec.Model, read: str):
    torch.manual_seed(1)
    model = build(s).eval()
    set_features_and_lora(model, read, None)
    return model


def test_a_fresh_mix_is_the_mean_of_all_layers():
    """Peters et al. 2018, equation 1, with equal weights and a scale of one."""
    model = reading(BERT, "scalar_mix")
    layers = model.encoder.all_hidden_states(model.embed_inputs(texts()))
    assert len(layers) == 4
    assert torch.allclose(model.hidden_states(texts()).hidden.values, torch.stack(layers).mean(0), atol=1e-6)


def test_a_mix_weighs_layers_by_a_softmax_and_scales_their_sum():
    model = reading(BERT, "scalar_mix")
    with torch.no_grad():
        model.scalar_mix.weights.copy_(torch.tensor([0.0, 1.0, 2.0, -1.0]))
        model.scalar_mix.scale.fill_(3.0)
    layers = torch.stack(model.encoder.all_hidden_states(model.embed_inputs(texts())))
    shares = torch.tensor([0.0, 1.0, 2.0, -1.0]).exp()
    wanted = 3 * sum(share * layer for share, layer in zip(shares / shares.sum(), layers, strict=True))
    assert torch.allclose(model.hidden_states(texts()).hidden.values, wanted, atol=1e-5)


@pytest.mark.parametrize("depth", [2, 6])
def test_the_last_four_leave_out_what_goes_into_the_first_block(depth):
    deep = bert.make_spec(
        bert.Config(d_model=16, heads=2, layers=depth, d_ff=24, max_length=16), source_vocab_size=30, head="sequence"
    )
    model = reading(deep, "concat_last_4")
    layers = model.encoder.all_hidden_states(model.embed_inputs(texts()))
    wanted = torch.cat(layers[-4:] if depth == 6 else layers[1:], -1)
    assert torch.equal(model.hidden_states(texts()).hidden.values, wanted)
    assert wanted.shape[1] == 16 * min(depth, 4)


def test_a_head_over_layers_side_by_side_is_a_sum_of_heads_over_each():
    """The concatenation of Devlin et al. 2019, 5.3: W [h1; h2; h3; h4] = W1 h1 + W2 h2 + W3 h3 + W4 h4."""
    config = bert.Config(d_model=16, heads=2, layers=6, d_ff=24, max_length=16)
    tokens = bert.make_spec(config, source_vocab_size=30, head="token", labels=("a", "b", "c"))
    model = reading(tokens, "concat_last_4")
    parts = model.head.linear.weight.split(16, 1)
    layers = model.encoder.all_hidden_states(model.embed_inputs(texts()))[-4:]
    wanted = sum(layer @ part.T for layer, part in zip(layers, parts, strict=True)) + model.head.linear.bias
    assert torch.allclose(model(texts()), wanted, atol=1e-6)


def test_a_dense_layer_brings_layers_side_by_side_to_the_width_of_one():
    model = reading(BERT, "concat_last_4")
    assert model.spec.head.num_concat_layers == 3
    assert (model.head.dense.weight.shape, model.head.linear.weight.shape) == ((16, 48), (2, 16))
    assert torch.count_nonzero(model.head.dense.weight) > 0
    set_features_and_lora(model, "last", None)
    assert (model.spec.head, model.head.dense.weight.shape) == (BERT.head, (16, 16))


def test_a_spec_whose_head_reads_otherwise_than_it_says_is_refused():
    with pytest.raises(InputError, match="does not read the concatenation of concat_last_4; train it again"):
        build(spec.replace(BERT, feature_layers="concat_last_4"))


@pytest.mark.parametrize("read", ["concat_last_4", "scalar_mix"])
@pytest.mark.parametrize("family", SPECS)
def test_every_body_can_be_read_so_and_is_saved_with_it(family, read):
    model = reading(SPECS[family], read)
    assert logits(model).shape == (2, 2)
    again = build(spec.from_json(spec.to_json(model.spec))).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("read", ["last", "scalar_mix"])
def test_a_frozen_body_runs_as_in_use_and_keeps_nothing_for_a_gradient(read):
    model = reading(BERT, read)
    before = model.hidden_states(texts()).hidden.values.detach()
    model.freeze_backbone()
    model.train()
    assert not model.encoder.training
    assert not model.source_embedding.training
    assert model.head.training
    hidden = model.hidden_states(texts()).hidden.values
    assert torch.equal(hidden, before)  # no dropout
    assert hidden.requires_grad == (read == "scalar_mix")  # by the mix's own weights alone
    logits(model).sum().backward()
    moved = {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None}
    assert moved == {"head", "scalar_mix"} if read == "scalar_mix" else {"head"}


def test_what_cannot_be_read_so_is_refused():
    with pytest.raises(InputError, match="reads its last layer only"):
        reading(
            rnn.make_spec(rnn.Config(d_model=8, hidden_size=8), source_vocab_size=30, head="sequence"), "scalar_mix"
        )
    with pytest.raises(InputError, match="a language model head reads the last layer only"):
        reading(bert.make_spec(bert.Config(d_model=16, heads=2, layers=1, d_ff=24), source_vocab_size=30), "scalar_mix")
