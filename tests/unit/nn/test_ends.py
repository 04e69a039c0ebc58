"""A head that reads one token of each sequence: the last block works on that one alone, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qkv.analysis.capture import capture_attention
from qkv.families import bert, gpt2, vit
from qkv.nn import Ragged, build
from qkv.nn.stack import Stack, enable_activation_checkpointing

LENGTHS = [5, 1, 9, 3]
LABELS = ("bad", "good", "neither")


def tiny(family: str):
    torch.manual_seed(3)
    if family == "vit":
        shape = vit.Config(d_model=16, heads=2, layers=2, d_ff=32, image_size=8, patch_size=4)
        return build(vit.make_spec(shape, head="sequence", labels=LABELS)).double().eval()
    module, fields = {"bert": (bert, {"source_vocab_size": 40}), "gpt2": (gpt2, {"target_vocab_size": 40})}[family]
    shape = module.Config(d_model=16, heads=2, layers=2, d_ff=32)
    return build(module.make_spec(shape, head="sequence", labels=LABELS, **fields)).double().eval()


def given(family: str) -> Ragged | Tensor:
    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        return torch.rand(3, 3, 8, 8, generator=generator, dtype=torch.float64)
    return Ragged.from_lengths(torch.randint(0, 40, (sum(LENGTHS),), generator=generator), LENGTHS)


def stack_of(model) -> Stack:
    return model.decoder if isinstance(getattr(model, "decoder", None), Stack) else model.encoder


def gradients(model, logits: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(logits.square().sum(), list(model.parameters()), allow_unused=True)
    return [torch.zeros(1) if one is None else one for one in found]


@pytest.mark.parametrize("family", ["bert", "gpt2", "vit"])
def test_logits_and_gradients_are_those_of_all_tokens(family: str) -> None:
    model, x = tiny(family), given(family)
    whole, short = model.head(model.hidden_states(x).hidden), model(x)
    torch.testing.assert_close(short, whole)
    for ours, wanted in zip(gradients(model, short), gradients(model, whole), strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-10, rtol=1e-7)


@pytest.mark.parametrize("family", ["bert", "gpt2", "vit"])
def test_the_last_feed_forward_sees_one_token_of_each_sequence(family: str) -> None:
    model, x, rows = tiny(family), given(family), []
    for block in stack_of(model).blocks:
        block.feedforward.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    logits = model(x)
    tokens = model.hidden_states(x).hidden.layout.num_tokens
    assert rows[:2] == [tokens, len(logits)]


def test_recomputing_leaves_the_logits_as_they_are_to_the_bit() -> None:
    model, x = tiny("bert").train(), given("bert")
    torch.manual_seed(5)
    plain = model(x)
    enable_activation_checkpointing(model)
    torch.manual_seed(5)
    assert torch.equal(model(x), plain)


def test_who_watches_the_last_layer_sees_every_token_look() -> None:
    model, x = tiny("bert"), given("bert")
    plain = model(x)
    with capture_attention(model) as maps:
        torch.testing.assert_close(model(x), plain)
    assert [tuple(seen.shape) for seen in list(maps.values())[-1]] == [(2, n, n) for n in LENGTHS]
