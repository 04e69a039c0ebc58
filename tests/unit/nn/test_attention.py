from __future__ import annotations

import pytest
import torch
from naive import naive_attend

from qkv.nn import Ragged
from qkv.nn.attention import Attention
from qkv.nn.mask import Causal
from qkv.spec import Attention as Spec

SCORES = ["dot", "scaled_dot", "bilinear", "additive", "mlp"]


def ragged(width: int, *sizes: int) -> Ragged:
    return Ragged.from_lengths(torch.randn(sum(sizes), width, dtype=torch.double), sizes)


@pytest.mark.parametrize("score", SCORES)
def test_attention_is_projection_attend_and_output_projection(score: str) -> None:
    module = Attention(Spec(query_dim=6, kv_dim=5, heads=2, head_dim=3, v_head_dim=4, score_fn=score)).double()
    x, memory = ragged(6, 2, 4), ragged(5, 3, 1)
    q = module.q(x.values).view(-1, 2, 3)
    k, v = module.k(memory.values).view(-1, 2, 3), module.v(memory.values).view(-1, 2, 4)
    naive = module.o(naive_attend(module.score, q, k, v, [2, 4], [3, 1], causal=False).flatten(1))
    torch.testing.assert_close(module(x, memory).values, naive)


@pytest.mark.parametrize("score", ["bilinear", "additive", "mlp"])
def test_without_projection_states_serve_as_query_key_and_value(score: str) -> None:
    module = Attention(Spec(query_dim=6, kv_dim=4, heads=2, score_fn=score, use_projections=False)).double()
    x, memory = ragged(6, 2, 4), ragged(4, 3, 1)
    q, k = x.values.view(-1, 2, 3), memory.values.view(-1, 2, 2)
    naive = naive_attend(module.score, q, k, k, [2, 4], [3, 1], causal=False).flatten(1)
    torch.testing.assert_close(module(x, memory).values, naive)


@pytest.mark.parametrize("score", SCORES)
def test_looking_row_by_row_equals_the_whole_forward(score: str) -> None:
    module = Attention(Spec(query_dim=6, kv_dim=5, heads=2, score_fn=score)).double()
    x, memory = ragged(6, 1, 1, 1), ragged(5, 3, 1, 4)
    torch.testing.assert_close(
        module.attend_precomputed(x.values, module.precompute_kv(memory)), module(x, memory).values
    )


@pytest.mark.parametrize("score", SCORES)
def test_beams_of_a_sentence_look_at_that_sentence(score: str) -> None:
    module = Attention(Spec(query_dim=6, kv_dim=5, heads=2, score_fn=score)).double()
    x, memory = ragged(6, 2, 2, 2), ragged(5, 3, 1, 4)  # two beams for each of three sentences
    torch.testing.assert_close(
        module.attend_precomputed(x.values, module.precompute_kv(memory)), module(x, memory).values
    )


@pytest.mark.parametrize("score", SCORES)
def test_cached_steps_equal_the_causal_forward(score: str) -> None:
    module = Attention(Spec(query_dim=6, heads=2, head_dim=3, v_head_dim=4, score_fn=score)).double()
    x = ragged(6, 5, 5)
    cache = module.new_cache(2, 5, x.values)
    steps = [module.step(x.to_padded()[:, t], cache) for t in range(5)]
    torch.testing.assert_close(torch.stack(steps, 1).flatten(0, 1), module(x, mask=Causal()).values)


def test_a_watched_step_gives_its_sink_rows_that_sum_to_one() -> None:
    module = Attention(Spec(query_dim=6, heads=2)).double()
    seen = []
    module.hook = lambda weights, *_: seen.append(weights.sum(-1))
    module.attend_precomputed(ragged(6, 1, 1).values, module.precompute_kv(ragged(6, 3, 1)))
    torch.testing.assert_close(seen, [torch.ones(2, 2, 1, dtype=torch.double)])


def test_dropout_of_weights_is_off_in_eval() -> None:
    module = Attention(Spec(query_dim=6, heads=2, dropout=0.5)).double().eval()
    x = ragged(6, 3, 5)
    assert torch.equal(module(x).values, module(x).values)


def test_dropout_of_weights_is_on_in_training() -> None:
    module = Attention(Spec(query_dim=6, heads=2, dropout=0.5)).double()
    x = ragged(6, 3, 5)
    assert not torch.equal(module(x).values, module(x).values)


def test_bias_can_be_left_out() -> None:
    module = Attention(Spec(query_dim=6, heads=2, bias=False))
    assert not [name for name, _ in module.named_parameters() if "bias" in name]
