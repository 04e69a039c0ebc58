"""From raw scores to a distribution, and from a distribution to a context."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.nn import Ragged
from qkv.nn.attention import Attention
from qkv.spec import Attention as Spec


def watched(module: Attention, x: Ragged, memory: Ragged | None = None) -> tuple[Tensor, Tensor]:
    """The output, and the weights [B, H, N, M] that made it."""
    seen = []
    module.hook = lambda weights, *_: seen.append(weights)
    out = module(x, memory).values
    return out, seen[0]


def plain(width: int, **fields: object) -> Attention:
    """Attention over states as they are, the score their dot product."""
    return Attention(Spec(query_dim=width, score_fn="dot", use_projections=False, **fields))


def scored(scores: list[float], values: Tensor) -> tuple[Attention, Ragged, Ragged]:
    """An attention whose raw scores are given: e goes in as the key's first number, the query asks for just that."""
    keys = torch.cat([torch.tensor(scores)[:, None], values], 1)
    query = torch.zeros(1, keys.shape[1])
    query[0, 0] = 1.0
    return plain(keys.shape[1]), Ragged.from_lengths(query, [1]), Ragged.from_lengths(keys, [len(keys)])


def test_weights_are_the_softmax_of_raw_scores() -> None:
    """Sequence to Sequence models: Attention Models, "Requirement on attention weights":
    w_i(t) = exp(e_i(t)) / Σ_j exp(e_j(t))."""
    e = torch.tensor([2.0, -1.0, 0.5, 0.0])
    _, weights = watched(*scored(e.tolist(), torch.randn(4, 3)))
    torch.testing.assert_close(weights.flatten(), e.exp() / e.exp().sum())


def test_weights_are_positive_and_sum_to_one() -> None:
    """Sequence to Sequence models: Attention Models, "Requirement on attention weights": "The weights w_i(t) must be
    positive and sum to 1.0"; raw weights "could be +ve or -ve"."""
    _, weights = watched(*scored([-30.0, -2.0, 0.0, 3.0], torch.randn(4, 3)))
    assert bool((weights > 0).all())
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, 1))


def test_the_context_is_the_weighted_sum_of_the_values() -> None:
    """(Even More) Language Modeling: Attention, "Attention": u_i = Σ_k α_k z_k."""
    module, x, memory = scored([1.0, -1.0, 0.3], torch.randn(3, 4))
    out, weights = watched(module, x, memory)
    torch.testing.assert_close(out[0], sum(w * z for w, z in zip(weights.flatten(), memory.values, strict=True)))


ALPHA = [0.3, 0.15, 0.07, 0.2, 0.11, 0.1, 0.07]  # h_0, h_1, h_2 and h_N are the slide's; "…" is filled up to one


def test_the_translation_example_has_the_weights_of_the_slide() -> None:
    """(Even More) Language Modeling: Attention, "Solution: Attention": α(o_0)_k = softmax(sim(o_0, h_k)) =
    (h_0: 0.3, h_1: 0.15, h_2: 0.07, …, h_N: 0.07) over "The cat is on the chair."."""
    similarities = torch.tensor(ALPHA).log().add(2.0).tolist()
    _, weights = watched(*scored(similarities, torch.randn(7, 3)))
    torch.testing.assert_close(weights.flatten(), torch.tensor(ALPHA))


def test_the_translation_example_combines_all_states_from_h_0_to_h_n() -> None:
    """(Even More) Language Modeling: Attention, "Solution: Attention": u_i = α_0 (h_0 vec) + … + α_N (h_N vec). The sum
    above it runs to N + 1, a slip: there are N + 1 values, the last is h_N."""
    module, x, memory = scored(torch.tensor(ALPHA).log().tolist(), torch.randn(7, 3))
    out, _ = watched(module, x, memory)
    torch.testing.assert_close(out[0], torch.tensor(ALPHA) @ memory.values)


def test_a_context_is_not_divided_by_the_number_of_words() -> None:
    """Sequence to Sequence models: Attention Models, "Using all input hidden states" prints c_t = 1/N Σ w_i(t) h_i. The
    weights sum to one already, so that equal states must give that state, not an N-th of it."""
    state = torch.randn(3)
    module, x, memory = scored([1.0, 2.0, 3.0, 4.0], state.expand(4, 3))
    out, _ = watched(module, x, memory)
    torch.testing.assert_close(out[0, 1:], state)


def test_a_weight_that_is_high_focuses_on_its_word() -> None:
    """Sequence to Sequence models: Attention Models, "Using all input hidden states": "when predicting the word
    'apfel', w_3(4), the weight for 'apple' must be high while the rest must be low"."""
    module, x, memory = scored([0.0, 0.0, 0.0, 25.0], torch.randn(4, 3))  # I ate an apple
    out, _ = watched(module, x, memory)
    torch.testing.assert_close(out[0], memory.values[3])


def test_the_average_differs_for_each_output_word() -> None:
    """Sequence to Sequence models: Attention Models, "Using all input hidden states": "Use a different weighted average
    for each output word"."""
    memory = Ragged.from_lengths(torch.randn(4, 5), [4])
    out, _ = watched(plain(5), Ragged.from_lengths(torch.randn(3, 5), [3]), memory)
    assert len({tuple(row) for row in out.tolist()}) == 3


def test_the_score_of_a_key_is_normalised_over_all_keys() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Attention Mechanism": s(q, k) → e^s(q,k_i) / Σ_j e^s(q,k_j), the
    output Σ_i s(q, k_i) v_i; checked with the additive score, which the slide leaves raw."""
    module = Attention(Spec(query_dim=3, kv_dim=4, score_fn="additive", use_projections=False))
    q, k = Ragged.from_lengths(torch.randn(1, 3), [1]), Ragged.from_lengths(torch.randn(5, 4), [5])
    raw = module.score(q.values[None], module.score.precompute_keys(k.values[None])).flatten()
    torch.testing.assert_close(module(q, k).values[0], (raw.exp() / raw.exp().sum()) @ k.values)
