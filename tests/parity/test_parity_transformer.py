"""Our Transformer, ragged, against torch.nn.Transformer, padded, with the same weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qkv.families import get_family
from qkv.nn import EncoderDecoder, Ragged, build

transformer = get_family("transformer")
WIDTH, HEADS, HIDDEN, VOCABULARY = 35, 5, 51, 17
SOURCE = Ragged.from_lengths(torch.arange(18) * 7 % VOCABULARY, [4, 9, 1, 4])
TARGET = Ragged.from_lengths(torch.arange(16) * 5 % VOCABULARY, [6, 2, 7, 1])

Tied = tuple[nn.Parameter, slice, nn.Parameter]  # theirs, the rows of it, ours


def attention_pairs(theirs: nn.MultiheadAttention, ours: Any) -> Iterator[Tied]:
    for n, projection in enumerate((ours.q, ours.k, ours.v)):
        rows = slice(n * WIDTH, (n + 1) * WIDTH)
        yield theirs.in_proj_weight, rows, projection.weight
        yield theirs.in_proj_bias, rows, projection.bias
    yield from whole(theirs.out_proj, ours.o)


def whole(theirs: nn.Module, ours: nn.Module) -> Iterator[Tied]:
    yield theirs.weight, slice(None), ours.weight
    yield theirs.bias, slice(None), ours.bias


def layer_pairs(theirs: Any, ours: Any) -> Iterator[Tied]:
    yield from attention_pairs(theirs.self_attn, ours.self_attention)
    yield from whole(theirs.norm1, ours.self_attention_residual.norm)
    if ours.cross_attention is not None:
        yield from attention_pairs(theirs.multihead_attn, ours.cross_attention)
        yield from whole(theirs.norm2, ours.cross_attention_residual.norm)
    yield from whole(theirs.linear1, ours.feedforward.up)
    yield from whole(theirs.linear2, ours.feedforward.down)
    yield from whole(theirs.norm2 if ours.cross_attention is None else theirs.norm3, ours.feedforward_residual.norm)


def pairs(theirs: nn.Transformer, ours: EncoderDecoder) -> Iterator[Tied]:
    for their_stack, our_stack in ((theirs.encoder, ours.encoder), (theirs.decoder, ours.decoder)):
        for layer, block in zip(their_stack.layers, our_stack.blocks, strict=True):
            yield from layer_pairs(layer, block)
        assert (their_stack.norm is None) == (our_stack.norm is None)
        if their_stack.norm is not None:
            yield from whole(their_stack.norm, our_stack.norm)


def their_transformer(norm_first: bool, activation: str, layers: int, decoder_layers: int) -> nn.Transformer:
    """As in the paper, a post-norm stack has no norm behind its last layer; torch's default has one."""
    options = {"dropout": 0.0, "activation": activation, "batch_first": True, "norm_first": norm_first}
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, **options),
        layers,
        norm=nn.LayerNorm(WIDTH) if norm_first else None,
        enable_nested_tensor=False,
    )
    decoder = nn.TransformerDecoder(
        nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, **options),
        decoder_layers,
        norm=nn.LayerNorm(WIDTH) if norm_first else None,
    )
    both = nn.Transformer(WIDTH, HEADS, custom_encoder=encoder, custom_decoder=decoder, batch_first=True)
    for parameter in both.parameters():  # also biases and gains, for zeros and ones hide mistakes
        nn.init.normal_(parameter, std=WIDTH**-0.5)
    return both


def embedded(table: Tensor, ids: Tensor) -> Tensor:
    """Vaswani et al. 2017, 3.4 and 3.5, written again."""
    place = [
        [(math.cos if d % 2 else math.sin)(t / 10000 ** ((d - d % 2) / WIDTH)) for d in range(WIDTH)]
        for t in range(ids.shape[1])
    ]
    return table[ids] * math.sqrt(WIDTH) + torch.tensor(place)


def their_logits(theirs: nn.Transformer, source: Tensor, target: Tensor) -> Tensor:
    """Padded in, real tokens out."""
    src, tgt = SOURCE.to_padded(), TARGET.to_padded()
    ahead = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
    out = theirs(
        embedded(source, src),
        embedded(target, tgt),
        tgt_mask=ahead,
        src_key_padding_mask=torch.zeros(src.shape).masked_fill(~SOURCE.layout.valid_mask(), float("-inf")),
        memory_key_padding_mask=torch.zeros(src.shape).masked_fill(~SOURCE.layout.valid_mask(), float("-inf")),
        tgt_key_padding_mask=torch.zeros(tgt.shape).masked_fill(~TARGET.layout.valid_mask(), float("-inf")),
    )
    return out[TARGET.layout.valid_mask()] @ target.T


@dataclass
class Both:
    theirs: nn.Transformer
    ours: EncoderDecoder
    source: nn.Parameter  # their embedding tables
    target: nn.Parameter

    def logits(self) -> tuple[Tensor, Tensor]:
        return their_logits(self.theirs, self.source, self.target), self.ours(SOURCE, TARGET)


SHAPES = [(False, "relu", 3, 3), (True, "relu", 3, 3), (False, "gelu", 1, 4), (True, "gelu", 4, 1)]


@pytest.fixture(params=SHAPES, ids=lambda p: f"{'pre' if p[0] else 'post'}-norm-{p[1]}-{p[2]}+{p[3]}")
def both(request: pytest.FixtureRequest) -> Both:
    norm_first, activation, layers, decoder_layers = request.param
    shape = transformer.Config(
        d_model=WIDTH,
        heads=HEADS,
        layers=layers,
        decoder_layers=decoder_layers,
        d_ff=HIDDEN,
        dropout=0.0,
        activation=activation,
        norm_first=norm_first,
    )
    ours = build(transformer.make_spec(shape, source_vocab_size=VOCABULARY, target_vocab_size=VOCABULARY))
    assert isinstance(ours, EncoderDecoder)
    theirs = their_transformer(norm_first, activation, layers, decoder_layers)
    with torch.no_grad():
        for their, rows, our in pairs(theirs, ours):
            our.copy_(their[rows])
    tables = (ours.source_embedding.tokens.weight, ours.target_embedding.tokens.weight)
    return Both(theirs, ours, *(nn.Parameter(table.detach().clone()) for table in tables))


def test_every_parameter_of_ours_is_taken_from_theirs(both: Both) -> None:
    taken = {id(our) for *_, our in pairs(both.theirs, both.ours)}
    left = {name for name, parameter in both.ours.named_parameters() if id(parameter) not in taken}
    assert left == {"source_embedding.tokens.weight", "target_embedding.tokens.weight"}


def test_logits_equal_torch_transformer(both: Both) -> None:
    theirs, ours = both.logits()
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def loss(logits: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, (TARGET.values + 3) % VOCABULARY, reduction="sum")


def test_gradients_equal_torch_transformer(both: Both) -> None:
    for logits in both.logits():
        loss(logits).backward()
    found = [(their.grad[rows], our.grad) for their, rows, our in pairs(both.theirs, both.ours)]
    found.append((both.source.grad, both.ours.source_embedding.tokens.weight.grad))
    found.append((both.target.grad, both.ours.target_embedding.tokens.weight.grad))
    largest = max(float(their.abs().max()) for their, _ in found)
    apart = [float((their - our).norm() / max(float(their.norm()), 1e-3 * largest)) for their, our in found]
    assert max(apart) <= 1e-4
