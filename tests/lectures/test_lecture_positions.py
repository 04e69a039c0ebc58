"""Why positions are needed, and what sinusoids are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from qkv import spec
from qkv.nn import Encoder, Ragged, build
from qkv.nn.embedding import TokenEmbedding
from qkv.nn.position import sinusoids

D, BASE = 128, 10000.0
TABLE = sinusoids(50, D)  # the example of the slide: d = 128, N = 50, n = 10000


def test_even_indices_are_sines() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Positional Embeddings": PE(pos, 2i) = sin(pos / n^(2i/d))."""
    naive = [[math.sin(pos / BASE ** (2 * i / D)) for i in range(D // 2)] for pos in range(50)]
    torch.testing.assert_close(TABLE[:, 0::2], torch.tensor(naive))


def test_odd_indices_are_cosines_of_the_same_angle() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Positional Embeddings": PE(pos, 2i+1) = cos(pos / n^(2i/d))."""
    naive = [[math.cos(pos / BASE ** (2 * i / D)) for i in range(D // 2)] for pos in range(50)]
    torch.testing.assert_close(TABLE[:, 1::2], torch.tensor(naive))


def test_the_first_two_indices_are_sine_and_cosine_of_the_position() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Sines and Cosines?!": for i = 0, PE(pos, 0) = sin(pos) and
    PE(pos, 1) = cos(pos)."""
    naive = [[math.sin(pos), math.cos(pos)] for pos in range(50)]
    torch.testing.assert_close(TABLE[:, :2], torch.tensor(naive))


def test_values_lie_between_minus_one_and_one() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Sines and Cosines?!": "Values always in the [-1, 1] range"."""
    assert float(TABLE.abs().max()) <= 1.0


def wavelengths(table: Tensor) -> Tensor:
    """2π / c, where c is the angle that one step turns each pair by.  # [d / 2]"""
    return 2 * math.pi / torch.atan2(table[1, 0::2], table[1, 1::2])


def test_the_wavelength_of_index_i_is_2_pi_n_to_the_2i_over_d() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Sines and Cosines?!": "wavelength → 2π/c = 2π * n^(2i/d)"."""
    naive = torch.tensor([2 * math.pi * BASE ** (2 * i / D) for i in range(D // 2)])
    torch.testing.assert_close(wavelengths(TABLE), naive, rtol=1e-4, atol=0)


def test_the_longest_wavelength_stays_below_n_2_pi() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Sines and Cosines?!" lets i run to d/2 and the wavelength to n *
    2π; by its own 0 ≤ i < d/2 the last one is n^((d-2)/d) * 2π."""
    longest = float(wavelengths(TABLE).max())
    assert longest == pytest.approx(2 * math.pi * BASE ** ((D - 2) / D), rel=1e-4)


def shift(tau: int) -> Tensor:
    """M_τ as printed: a block [cos ωτ, sin ωτ; -sin ωτ, cos ωτ] for each frequency, with ω from l = 0 on."""
    blocks = []
    for pair in range(D // 2):
        angle = tau / BASE ** (2 * pair / D)
        blocks.append(torch.tensor([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]))
    return torch.block_diag(*blocks)


@pytest.mark.parametrize("tau", [0, 1, 5, 17])
def test_a_shift_by_tau_is_one_linear_map_at_every_place(tau: int) -> None:
    """Sequence to Sequence models: Attention Models, "Positional Encoding": P_(t+τ) = M_τ P_t."""
    torch.testing.assert_close(TABLE[: 50 - tau] @ shift(tau).T, TABLE[tau:], atol=1e-5, rtol=0)


def test_the_printed_shift_has_the_sign_that_sine_before_cosine_needs() -> None:
    """Sequence to Sequence models: Attention Models, "Positional Encoding": with P_t = [sin; cos; …] the printed M_τ is
    right, and its transpose would step back: P_(t-τ)."""
    torch.testing.assert_close(TABLE[3:] @ shift(3), TABLE[:-3], atol=1e-5, rtol=0)


def test_the_encoding_never_repeats() -> None:
    """Sequence to Sequence models: Attention Models, "Positional Encoding": "Never repeats"."""
    table = sinusoids(2000, 16)
    assert len({tuple(row) for row in table.tolist()}) == 2000


def test_frequencies_are_counted_from_zero() -> None:
    """Sequence to Sequence models: Attention Models, "Positional Encoding" lists sin ω_1 t first with
    ω_l = 1/10000^(2l/d), l = 1 … d/2, which would drop the fastest frequency; counted from l = 0, as its own "every
    2l-th component", it is the other deck's PE(pos, 2i)."""
    assert float(TABLE[1, 0]) == pytest.approx(math.sin(1.0))
    assert float(TABLE[1, 0]) != pytest.approx(math.sin(1 / BASE ** (2 / D)), abs=1e-3)


def encoder(position: str) -> Encoder:
    attention = spec.Attention(query_dim=16, heads=2)
    block = spec.Block(self_attention=attention, feedforward=spec.FeedForward(d_model=16, d_ff=24))
    embed = spec.Embedding(vocab_size=20, d_model=16, position=position)
    model = build(
        spec.Model(family="test", source_embedding=embed, encoder=spec.TransformerStack(block=block, num_layers=2))
    )
    assert isinstance(model, Encoder)
    return model


WORDS, ORDER = torch.tensor([3, 1, 4, 15, 9, 2]), torch.tensor([5, 0, 3, 1, 4, 2])


def test_without_positions_self_attention_does_not_see_order() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Positional Embeddings": attention "is just an aggregation over a
    set of representations", "retains no order information"; DS 4440: "why is this needed?"."""
    model = encoder("none")
    straight, shuffled = model(Ragged.from_lengths(WORDS, [6])), model(Ragged.from_lengths(WORDS[ORDER], [6]))
    torch.testing.assert_close(shuffled, straight[ORDER])


@pytest.mark.parametrize("position", ["sinusoid", "learned"])
def test_with_positions_self_attention_sees_order(position: str) -> None:
    """Transformers and Pretraining, 1.2 "Input & Positional Embedding": "a positional encoding that differs for each
    sequence position in order to enable the model to differentiate the positions"."""
    model = encoder(position)
    straight, shuffled = model(Ragged.from_lengths(WORDS, [6])), model(Ragged.from_lengths(WORDS[ORDER], [6]))
    assert not torch.allclose(shuffled, straight[ORDER], atol=1e-3)


def test_positions_are_added_to_embeddings() -> None:
    """Sequence to Sequence models: Attention Models, "Self attention": "We add a 'positional' encoding to them"."""
    embed = TokenEmbedding(spec.Embedding(vocab_size=20, d_model=16))
    torch.testing.assert_close(
        embed(Ragged.from_lengths(WORDS, [6])).values, embed.tokens.weight[WORDS] + sinusoids(6, 16), atol=1e-6, rtol=0
    )


def test_learned_positions_are_one_more_parameter_matrix() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Positional Embeddings": in BERT "W_PE ∈ R^(N x d) another
    parameter matrix, along with W_emb ∈ R^(|V| x d)"."""
    embed = TokenEmbedding(spec.Embedding(vocab_size=20, d_model=16, max_length=50, position="learned"))
    assert sorted(tuple(p.shape) for p in embed.parameters()) == [(20, 16), (50, 16)]


def test_positions_count_from_zero() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Positional Embeddings": pos in {0, 1, 2, …, N-1} (a later slide
    says from 1 to N)."""
    torch.testing.assert_close(TABLE[0], torch.tensor([0.0, 1.0]).repeat(D // 2))
