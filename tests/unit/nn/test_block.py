from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv import spec
from qkv.nn import Ragged
from qkv.nn.block import Block
from qkv.nn.feedforward import FeedForward
from qkv.nn.mask import Bidirectional, Causal
from qkv.nn.norm import build_norm
from qkv.nn.stack import EncoderOutput, Stack

X = Ragged.from_lengths(torch.randn(7, 6, generator=torch.Generator().manual_seed(1)), [3, 4])
MEMORY = Ragged.from_lengths(torch.randn(5, 6, generator=torch.Generator().manual_seed(2)), [1, 4])


def block_of(**fields: object) -> Block:
    attention = spec.Attention(query_dim=6, heads=2)
    feedforward = spec.FeedForward(d_model=6, d_ff=9)
    block = Block(
        spec.Block(**{"self_attention": attention, "feedforward": feedforward, "cross_attention": attention} | fields)
    )
    for module in block.modules():
        if isinstance(module, nn.LayerNorm):  # gains of one and shifts of zero hide mistakes
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return block


def sublayers(block: Block) -> list[tuple[nn.Module, object]]:
    return [
        (block.self_attention_residual.norm, lambda y: block.self_attention(X.with_values(y)).values),
        (block.cross_attention_residual.norm, lambda y: block.cross_attention(X.with_values(y), MEMORY).values),
        (block.feedforward_residual.norm, block.feedforward),
    ]


def test_post_norm_normalises_the_sum() -> None:
    block, x = block_of(norm_first=False), X.values
    for normalise, f in sublayers(block):
        x = normalise(x + f(x))
    torch.testing.assert_close(block(X, Bidirectional(), MEMORY).values, x)


def test_pre_norm_normalises_what_goes_into_the_sublayer() -> None:
    block, x = block_of(norm_first=True), X.values
    for normalise, f in sublayers(block):
        x = x + f(normalise(x))
    torch.testing.assert_close(block(X, Bidirectional(), MEMORY).values, x)


def test_a_pre_norm_stack_ends_in_a_norm_when_asked() -> None:
    attention, feedforward = spec.Attention(query_dim=6), spec.FeedForward(d_model=6, d_ff=9)
    block = spec.Block(self_attention=attention, feedforward=feedforward, norm_first=True)
    stack = Stack(spec.TransformerStack(block=block, num_layers=2, final_norm=True))
    torch.testing.assert_close(stack(X).hidden.values.mean(-1), torch.zeros(7))


def test_a_stack_applies_its_blocks_in_order() -> None:
    block = spec.Block(self_attention=spec.Attention(query_dim=6), feedforward=spec.FeedForward(d_model=6, d_ff=9))
    stack, x = Stack(spec.TransformerStack(block=block, num_layers=3)), X
    for layer in stack.blocks:
        x = layer(x, Bidirectional())
    assert torch.equal(stack(X, EncoderOutput(MEMORY)).hidden.values, x.values)


def test_dropout_is_off_in_eval() -> None:
    block = block_of(dropout=0.5).eval()
    assert torch.equal(block(X, Bidirectional(), MEMORY).values, block(X, Bidirectional(), MEMORY).values)


def test_dropout_is_on_in_training() -> None:
    block = block_of(dropout=0.5)
    assert not torch.equal(block(X, Bidirectional(), MEMORY).values, block(X, Bidirectional(), MEMORY).values)


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    module = build_norm(spec.Norm(kind="rms", eps=0.01), 6)
    naive = X.values / (X.values.square().mean(-1, keepdim=True) + 0.01).sqrt()
    torch.testing.assert_close(module(X.values), naive)


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


FORMULAS = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "gelu_tanh": gelu_tanh,
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


@pytest.mark.parametrize("activation", FORMULAS)
def test_feed_forward_is_its_formula(activation: str) -> None:
    module = FeedForward(spec.FeedForward(d_model=6, d_ff=9, activation=activation))
    hidden = FORMULAS[activation](X.values @ module.up.weight.T + module.up.bias)
    torch.testing.assert_close(module(X.values), hidden @ module.down.weight.T + module.down.bias)


@pytest.mark.parametrize("activation", FORMULAS)
def test_gated_feed_forward_is_its_formula(activation: str) -> None:
    module = FeedForward(spec.FeedForward(d_model=6, d_ff=9, activation=activation, gated=True, bias=False))
    assert module.gate is not None
    hidden = FORMULAS[activation](X.values @ module.gate.weight.T) * (X.values @ module.up.weight.T)
    torch.testing.assert_close(module(X.values), hidden @ module.down.weight.T)


def test_feed_forward_without_bias_has_none() -> None:
    module = FeedForward(spec.FeedForward(d_model=6, d_ff=9, bias=False))
    torch.testing.assert_close(module(X.values), F.relu(X.values @ module.up.weight.T) @ module.down.weight.T)


def test_a_whole_block_compiled_once_serves_batches_of_any_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        programs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    plain, compiled = block_of(), block_of()
    compiled.load_state_dict(plain.state_dict())
    compiled.compile_forward()
    counts = []
    for lengths in ([3, 4], [5, 2, 7], [2, 6, 3], [4, 2, 9, 3], [8, 2]):
        x = Ragged.from_lengths(torch.randn(sum(lengths), 6), lengths)
        memory = Ragged.from_lengths(torch.randn(2 * len(lengths) + 1, 6), [3, *[2] * (len(lengths) - 1)])
        torch.testing.assert_close(compiled(x, Causal(), memory).values, plain(x, Causal(), memory).values)
        counts.append(len(programs))
    assert counts[0] > 0
    assert counts[-1] == counts[1]  # one for the first shape, one for all others


@pytest.mark.skipif(not torch.cuda.is_available(), reason="whole blocks are compiled for a GPU's half precision; none")
def test_a_compiled_block_that_looks_at_a_memory_has_the_plain_ones_output_and_gradients_on_a_gpu() -> None:
    attention = spec.Attention(query_dim=32, heads=2)
    shape = spec.Block(
        self_attention=attention, cross_attention=attention, feedforward=spec.FeedForward(d_model=32, d_ff=64)
    )
    plain, compiled = Block(shape).cuda(), Block(shape).cuda()
    compiled.load_state_dict(plain.state_dict())
    compiled.compile_forward()
    for lengths, looked_at in (
        ([3, 40], [5, 7]),
        ([5, 2, 70], [9, 1, 44]),
        ([64, 64], [32, 32]),
        ([6, 3, 8, 2], [4] * 4),
    ):
        x, memory = (
            Ragged.from_lengths(torch.randn(sum(n), 32, device="cuda").requires_grad_(), n)
            for n in (lengths, looked_at)
        )
        found = []
        for block in (plain, compiled):
            block.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                out = block(x, Causal(), memory).values
            given = torch.autograd.grad(out.float().square().sum(), [x.values, memory.values, *block.parameters()])
            found.append([out, *given])
        for ours, wanted in zip(*found, strict=True):
            torch.testing.assert_close(ours, wanted, atol=0.1, rtol=0.05)
