"""Adapters: they begin as nothing, merge into what they do, and touch no other parameter."""

from __future__ import annotations

import pytest
import torch

from qkv import spec
from qkv.errors import InputError
from qkv.families import bert, gpt2, rnn, t5
from qkv.nn import Ragged, build
from qkv.nn.construction import build_on_meta, set_features_and_lora
from qkv.nn.model import is_head_or_lora

BERT = bert.make_spec(
    bert.Config(d_model=16, heads=2, layers=3, d_ff=24, max_length=16), source_vocab_size=30, head="sequence"
)
GPT2 = gpt2.make_spec(gpt2.Config(d_model=16, heads=2, layers=2, max_length=16), target_vocab_size=30, head="sequence")
T5 = t5.make_spec(
    t5.Config(d_model=16, heads=2, d_kv=8, layers=2, d_ff=24, gated=True),
    source_vocab_size=30,
    target_vocab_size=30,
    head="sequence",
)
# matrices of a size at which a layer's answer matters
SPECS = {name: spec.replace(s, init_std=0.3) for name, s in (("bert", BERT), ("gpt2", GPT2), ("t5", T5))}
EVERY = ("q", "k", "v", "o", "up", "down")


def texts() -> Ragged:
    return Ragged.pack([torch.arange(4, 11), torch.tensor([8, 20, 3])])


def logits(model):
    x = texts()
    return model(x, x.shift_right(model.spec.bos_id)) if model.spec.encoder and model.spec.decoder else model(x)


def adapted(s: spec.Model, **fields) -> torch.nn.Module:
    torch.manual_seed(1)
    model = build(s).eval()
    set_features_and_lora(model, "last", spec.LoraConfig(**fields))
    return model


def stirred(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".lora_B"):
                parameter.normal_()
    return model


@pytest.mark.parametrize("family", SPECS)
def test_fresh_adapters_change_no_logit(family):
    torch.manual_seed(1)
    plain = build(SPECS[family]).eval()
    assert torch.equal(logits(adapted(SPECS[family], rank=2, target_modules=EVERY)), logits(plain))


@pytest.mark.parametrize("family", SPECS)
def test_merged_matrices_do_what_adapters_did(family):
    model = stirred(adapted(SPECS[family], rank=2, target_modules=EVERY))
    before = logits(model)
    set_features_and_lora(model, "last", None)
    assert (logits(model) - before).abs().max() < 1e-5
    assert not any(name.endswith((".lora_A", ".lora_B")) for name in model.state_dict())
    torch.manual_seed(1)
    assert (before - logits(build(SPECS[family]).eval())).abs().max() > 0.01


def test_the_paper_formula_is_what_a_layer_computes():
    """Hu et al. 2022, equation 3: h = W x + B A x, scaled by alpha / r (4.1)."""
    model = stirred(adapted(BERT, rank=2, alpha=6.0))
    layer = model.encoder.blocks[0].self_attention.q
    x = torch.randn(5, 16)
    delta = layer.lora_B @ layer.lora_A
    assert torch.allclose(layer(x), x @ (layer.weight + 3.0 * delta).T + layer.bias, atol=1e-5)


def test_a_spec_with_adapters_builds_them():
    model = stirred(adapted(BERT, rank=3, target_modules=("v",)))
    again = build_on_meta(spec.from_json(spec.to_json(model.spec)))
    assert {n: p.shape for n, p in again.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert model.spec.lora.target_modules == ("v",)


def test_a_frozen_body_with_adapters_trains_them_and_the_head_alone():
    model = adapted(BERT, rank=2)
    model.freeze_backbone()
    model.train()
    assert model.encoder.training
    logits(model).sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == is_head_or_lora(name), name
    moved = {name for name, p in model.named_parameters() if p.grad is not None}
    assert moved == {
        n for n, _ in model.named_parameters() if n.startswith("head.") or n.endswith((".lora_A", ".lora_B"))
    }


def test_gradients_of_adapters_are_the_same_where_layers_are_worked_out_again():
    from qkv.nn.stack import enable_activation_checkpointing

    def gradients(prepare):
        model = stirred(adapted(BERT, rank=2, target_modules=("q", "down")))
        model.freeze_backbone()
        prepare(model)
        model.train()
        torch.manual_seed(4)
        logits(model).square().sum().backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    plain, again = gradients(lambda _: None), gradients(enable_activation_checkpointing)
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize(
    ("matrices", "said"),
    [(("queries",), "there is no layer 'queries'"), (("gate",), "no block of this model has a layer 'gate'")],
)
def test_a_layer_that_is_not_there_is_named(matrices, said):
    with pytest.raises(InputError, match=said):
        adapted(BERT, target_modules=matrices)


def test_a_recurrent_model_has_no_place_for_adapters():
    with pytest.raises(InputError, match="no block of this model has a layer 'q'"):
        adapted(rnn.make_spec(rnn.Config(d_model=8, hidden_size=8), source_vocab_size=30, head="sequence"))
