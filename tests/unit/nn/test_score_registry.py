"""A score function is registered by name and used by that name, as the built-in ones are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import qkv
from qkv import spec
from qkv.analysis import capture_attention, cost
from qkv.errors import InputError
from qkv.families import rnn
from qkv.nn import EncoderDecoder, Ragged, build
from qkv.nn.attention_score import AttentionScore, build_score
from qkv.recipe.model_section import model_spec
from qkv.recipe.parse import read_recipe
from qkv.score_functions import SCORE_FUNCTIONS

NAMES = ["scaled_dot", "dot", "bilinear", "additive", "mlp"]


class Cosine(AttentionScore):
    """Cosine of query and key, times a learned factor."""

    def __init__(self, s: spec.Attention):
        super().__init__(s)
        self.factor = torch.nn.Parameter(torch.full((s.heads, 1, 1), 3.0))

    def forward(self, queries: Tensor, precomputed_keys: Tensor) -> Tensor:
        return F.normalize(queries, dim=-1) @ F.normalize(precomputed_keys, dim=-1).transpose(-1, -2) * self.factor


@pytest.fixture
def cosine() -> Iterator[str]:
    qkv.register.score_function("cosine", Cosine)
    yield "cosine"
    SCORE_FUNCTIONS._entries.pop("cosine")


def test_the_built_in_score_functions_are_those_of_the_spec() -> None:
    assert SCORE_FUNCTIONS.names()[:5] == NAMES
    assert {build_score(spec.Attention(query_dim=4, score_fn=name)).kind for name in NAMES} == set(NAMES)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("dot", []),
        ("scaled_dot", []),
        ("bilinear", ["matrix"]),
        ("additive", ["from_key", "from_query", "vector"]),
        ("mlp", ["from_key", "from_query", "vector", "bias", "hidden_weight", "hidden_bias"]),
    ],
)
def test_parameter_names_are_those_of_saved_models(name: str, parameters: list[str]) -> None:
    assert list(build_score(spec.Attention(query_dim=4, score_fn=name)).state_dict()) == parameters


def test_an_unknown_score_function_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match="score function 'aditive'; did you mean 'additive'"):
        build_score(spec.Attention(query_dim=4, score_fn="aditive"))


def test_a_recurrent_recipe_uses_a_registered_score_function(cosine: str, request: pytest.FixtureRequest) -> None:
    path = request.config.rootpath / "recipes" / "g2p-rnn-additive.yaml"
    recipe = read_recipe(path, [f"model.attention={cosine}", "model.size=small"])
    made = model_spec(recipe, source_vocab_size=9, target_vocab_size=9)
    model = build(made).eval()
    assert isinstance(model, EncoderDecoder)
    assert "decoder.attention.score.factor" in model.state_dict()
    source = Ragged.pack([torch.tensor([4, 5, 6]), torch.tensor([7])])
    target = Ragged.pack([torch.tensor([2, 5]), torch.tensor([2, 6, 7])])
    with torch.no_grad(), capture_attention(model) as maps:
        assert model(source, target).shape == (5, 9)
    sums = torch.cat([weights.sum(-1).flatten() for weights in maps["decoder.attention"]])
    torch.testing.assert_close(sums, torch.ones_like(sums))
    assert spec.from_json(spec.to_json(made)) == made


def test_the_cost_of_a_registered_score_function_defaults_to_that_of_a_dot_product(cosine: str) -> None:
    costs = [
        cost(rnn.make_spec(rnn.Config(attention=name)), source_length=5, target_length=6) for name in (cosine, "dot")
    ]
    assert costs[0].attention_flops == costs[1].attention_flops
