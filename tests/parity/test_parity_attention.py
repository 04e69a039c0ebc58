"""Our Attention, ragged, against torch.nn.MultiheadAttention, padded, with the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from qkv.nn import Ragged
from qkv.nn.attention import Attention
from qkv.nn.mask import Causal
from qkv.spec import Attention as Spec

SHAPES = [(35, 5, 35), (35, 5, 22), (6, 1, 7), (12, 12, 12)]  # width, heads, width of the memory


def both(width: int, heads: int, memory: int) -> tuple[nn.MultiheadAttention, Attention]:
    theirs = nn.MultiheadAttention(width, heads, kdim=memory, vdim=memory, batch_first=True)
    nn.init.normal_(theirs.in_proj_bias)
    nn.init.normal_(theirs.out_proj.bias)
    ours = Attention(Spec(query_dim=width, kv_dim=memory, heads=heads))
    weights = [theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight]
    if theirs.in_proj_weight is not None:  # torch packs them where all widths are equal
        weights = list(theirs.in_proj_weight.chunk(3))
    with torch.no_grad():
        for n, linear in enumerate((ours.q, ours.k, ours.v)):
            linear.weight.copy_(weights[n])
            linear.bias.copy_(theirs.in_proj_bias.chunk(3)[n])
        ours.o.load_state_dict(theirs.out_proj.state_dict())
    return theirs, ours


def batch(width: int, memory: int) -> tuple[Ragged, Ragged]:
    return Ragged.from_lengths(torch.randn(12, width), [5, 1, 6]), Ragged.from_lengths(
        torch.randn(13, memory), [2, 7, 4]
    )


def theirs_on(theirs: nn.MultiheadAttention, x: Ragged, memory: Ragged) -> tuple[Tensor, Tensor]:
    padded = memory.to_padded()
    out, weights = theirs(x.to_padded(), padded, padded, key_padding_mask=~memory.layout.valid_mask())
    return out[x.layout.valid_mask()], weights


@pytest.mark.parametrize(("width", "heads", "memory_width"), SHAPES)
def test_cross_attention_equals_multihead_attention(width: int, heads: int, memory_width: int) -> None:
    theirs, ours = both(width, heads, memory_width)
    x, memory = batch(width, memory_width)
    torch.testing.assert_close(ours(x, memory).values, theirs_on(theirs, x, memory)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("width", "heads", "memory_width"), SHAPES)
def test_the_mean_of_the_heads_weights_equals_multihead_attentions(width: int, heads: int, memory_width: int) -> None:
    theirs, ours = both(width, heads, memory_width)
    x, memory = batch(width, memory_width)
    seen: dict[int, Tensor] = {}

    def sink(weights: Tensor, rows: list[int], queries: list[int], keys: list[int]) -> None:
        told = zip(rows, weights.mean(1), queries, keys, strict=True)
        seen.update({row: mean[:n, :m] for row, mean, n, m in told})

    ours.hook = sink
    ours(x, memory)
    _, weights = theirs_on(theirs, x, memory)
    sizes = enumerate(zip(x.layout.lengths_list, memory.layout.lengths_list, strict=True))
    torch.testing.assert_close(seen, {row: weights[row, :n, :m] for row, (n, m) in sizes}, atol=1e-5, rtol=0)


@pytest.mark.parametrize("heads", [1, 5])
def test_causal_self_attention_equals_multihead_attention_with_a_mask(heads: int) -> None:
    theirs, ours = both(35, heads, 35)
    x, _ = batch(35, 35)
    padded = x.to_padded()
    ahead = torch.ones(6, 6, dtype=torch.bool).triu(1)
    out, _ = theirs(padded, padded, padded, attn_mask=ahead, key_padding_mask=~x.layout.valid_mask())
    torch.testing.assert_close(ours(x, mask=Causal()).values, out[x.layout.valid_mask()], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("width", "heads", "memory_width"), SHAPES)
def test_gradients_of_the_inputs_equal_multihead_attentions(width: int, heads: int, memory_width: int) -> None:
    theirs, ours = both(width, heads, memory_width)
    x, memory = batch(width, memory_width)
    leaves = [x.values.requires_grad_(), memory.values.requires_grad_()]
    weights = torch.randn(12, width)
    wanted = torch.autograd.grad((theirs_on(theirs, x, memory)[0] * weights).sum(), leaves)
    found = torch.autograd.grad((ours(x, memory).values * weights).sum(), leaves)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
