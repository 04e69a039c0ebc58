from __future__ import annotations

import pytest
import torch

from qkv.nn import Ragged
from qkv.nn.embedding import TokenEmbedding
from qkv.nn.position import LearnedPositions, SinusoidalPositions, sinusoids
from qkv.spec import Embedding as Spec
from qkv.spec import Norm

IDS = Ragged.from_lengths(torch.tensor([5, 1, 5, 5, 2]), [2, 3])


@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_a_table_of_sinusoids_has_the_width_it_was_asked_for(width: int) -> None:
    assert sinusoids(7, width).shape == (7, width)


def test_sinusoids_are_not_in_the_state_dict() -> None:
    assert not SinusoidalPositions(4, 6).state_dict()


def test_a_learned_position_is_its_row_of_parameters() -> None:
    module = LearnedPositions(4, 6)
    torch.nn.init.normal_(module.weight)
    assert torch.equal(module(torch.tensor([3, 0, 3])), module.weight[[3, 0, 3]])


@pytest.mark.parametrize("position", ["sinusoid", "learned"])
def test_an_embedding_is_token_plus_place_in_its_own_sequence(position: str) -> None:
    embed = TokenEmbedding(Spec(vocab_size=6, d_model=4, max_length=3, position=position))
    for parameter in embed.parameters():
        torch.nn.init.normal_(parameter)
    table = sinusoids(3, 4) if position == "sinusoid" else embed.position.weight
    naive = embed.tokens.weight[IDS.values] + table[[0, 1, 0, 1, 2]]
    torch.testing.assert_close(embed(IDS).values, naive)


def test_without_positions_a_token_is_the_same_everywhere() -> None:
    embed = TokenEmbedding(Spec(vocab_size=6, d_model=4, position="none"))
    assert torch.equal(embed(IDS).values, embed.tokens.weight[IDS.values])


def test_tokens_are_scaled_before_positions_are_added() -> None:
    embed = TokenEmbedding(Spec(vocab_size=6, d_model=4, scale_by_sqrt_dim=True))
    naive = 2 * embed.tokens.weight[IDS.values] + sinusoids(3, 4)[[0, 1, 0, 1, 2]]
    torch.testing.assert_close(embed(IDS).values, naive)


def test_an_embedding_with_a_norm_has_mean_zero() -> None:
    embed = TokenEmbedding(Spec(vocab_size=6, d_model=4, norm=Norm()))
    torch.testing.assert_close(embed(IDS).values.mean(-1), torch.zeros(5))


def test_a_sequence_longer_than_the_model_takes_is_refused() -> None:
    embed = TokenEmbedding(Spec(vocab_size=6, d_model=4, max_length=2))
    with pytest.raises(ValueError, match="3 tokens; this model takes at most 2"):
        embed(IDS)
