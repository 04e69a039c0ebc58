"""Residual, layer normalisation, feed-forward, and the block that they make with attention."""

from __future__ import annotations

import torch
from torch import nn

from qkv import spec
from qkv.families import get_family
from qkv.nn import Ragged
from qkv.nn.block import Block, Residual
from qkv.nn.feedforward import FeedForward
from qkv.nn.mask import Bidirectional
from qkv.nn.norm import build_norm
from qkv.nn.stack import Stack

D, F = 6, 10
X = torch.randn(4, D, generator=torch.Generator().manual_seed(1))
BLOCK = spec.Block(
    self_attention=spec.Attention(query_dim=D, heads=2),
    feedforward=spec.FeedForward(d_model=D, d_ff=F),
    norm=spec.Norm(eps=1e-12),
)


def z(x: torch.Tensor) -> torch.Tensor:
    """x_i → (x_i - μ) / σ in each row."""
    return (x - x.mean(-1, keepdim=True)) / x.std(-1, correction=0, keepdim=True)


def test_the_feed_forward_layer_is_its_formula() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Feed-Forward Layer": FFN(x) = ReLU(x W_1 + b_1) W_2 + b_2."""
    module = FeedForward(spec.FeedForward(d_model=D, d_ff=F))
    w1, b1, w2, b2 = module.up.weight.T, module.up.bias, module.down.weight.T, module.down.bias
    torch.testing.assert_close(module(X), torch.maximum(X @ w1 + b1, torch.zeros(())) @ w2 + b2)


def test_the_feed_forward_layer_has_the_shapes_of_the_slide() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Feed-Forward Layer": W_1 ∈ R^(d x f), b_1 ∈ R^f, W_2 ∈ R^(f x d),
    b_2 ∈ R^d."""
    module = FeedForward(spec.FeedForward(d_model=D, d_ff=F))
    shapes = [module.up.weight.T.shape, module.up.bias.shape, module.down.weight.T.shape, module.down.bias.shape]
    assert [tuple(shape) for shape in shapes] == [(D, F), (F,), (F, D), (D,)]


def test_the_papers_sizes_have_a_hidden_layer_four_times_the_width() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Feed-Forward Layer": "Vaswani et al. set f = 4d"."""
    sizes = get_family("transformer").PRESETS
    assert all(shape.d_ff == 4 * shape.d_model for shape in sizes.values())


def test_each_token_is_transformed_independently() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Feed-Forward Layer": "Each token vector x is then independently
    transformed"; DS 4440, "Transformers": "FFN (Position wise)"."""
    module = FeedForward(spec.FeedForward(d_model=D, d_ff=F))
    torch.testing.assert_close(module(X), torch.stack([module(x) for x in X]))


def test_layer_normalisation_standardises_each_row() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Layer Normalization": x_i → (x_i - μ) / σ with "μ as mean and σ as
    st. deviation on x"."""
    module = build_norm(spec.Norm(eps=1e-12), D)
    torch.testing.assert_close(module(X), z(X))


def test_layer_normalisation_ends_in_gain_and_shift() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Layer Normalization": γ * X'' + β, both in R^d, row by row."""
    module = build_norm(spec.Norm(eps=1e-12), D)
    nn.init.normal_(module.weight)
    nn.init.normal_(module.bias)
    torch.testing.assert_close(module(X), module.weight * z(X) + module.bias)


def test_layer_normalisation_is_batch_normalisation_transposed() -> None:
    """DS 4440 RNNs → Contextual embeddings → Transformers, "add + Norm": "a layer norm, which is like batch norm but
    Transposed"."""
    transposed = nn.functional.batch_norm(X.T, None, None, training=True, eps=1e-12).T
    torch.testing.assert_close(build_norm(spec.Norm(eps=1e-12), D)(X), transposed)


def test_normalisation_follows_the_residual_sum() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Layer Normalization": layer_norm(X + layer(X)), with "Residuals":
    res(layer, X) = X + layer(X)."""
    around, layer = Residual(D, spec.Norm(eps=1e-12), norm_first=False, dropout=0.0), nn.Linear(D, D)
    torch.testing.assert_close(around(X, layer), z(X + layer(X)))


def test_both_sublayers_have_a_residual_around_them() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Residuals": "Both those layers have a residual connection around
    them": multi-head attention, then feed-forward."""
    block, x = Block(BLOCK), Ragged.from_lengths(X, [4])
    after = z(X + block.self_attention(x).values)
    torch.testing.assert_close(block(x, Bidirectional()).values, z(after + block.feedforward(after)))


def test_with_layers_that_give_nothing_a_residual_passes_its_input() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Residuals": "layer input added to its output"."""
    around = Residual(D, spec.Norm(), norm_first=True, dropout=0.0)
    assert torch.equal(around(X, torch.zeros_like), X)


def test_a_stack_is_identical_layers_with_weights_of_their_own() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Transformer": "N_L identical Transformer layers"."""
    layers = list(Stack(spec.TransformerStack(block=BLOCK, num_layers=3)).blocks)
    shapes = [[tuple(p.shape) for p in layer.parameters()] for layer in layers]
    assert shapes[0] == shapes[1] == shapes[2]
    assert not torch.equal(layers[0].self_attention.q.weight, layers[1].self_attention.q.weight)
