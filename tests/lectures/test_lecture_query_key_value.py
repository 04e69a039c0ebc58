"""Query, key and value; self-attention; several heads."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from qkv.nn import Ragged
from qkv.nn.attention import Attention
from qkv.spec import Attention as Spec

N, D = 5, 8
X = Ragged.from_lengths(torch.randn(N, D, generator=torch.Generator().manual_seed(1)), [N])


def by_head(linear: torch.nn.Linear, heads: int) -> list[Tensor]:
    """W_h of x W_h for each head.  # [d, size]"""
    return [part.T for part in linear.weight.chunk(heads)]


def head_output(module: Attention, x: Tensor, memory: Tensor, head: int) -> Tensor:
    """Z_h = softmax(Q_h K_h^T / √k) V_h, as the slides print it, without biases."""
    q, k, v = (by_head(w, module.heads)[head] for w in (module.q, module.k, module.v))
    queries, keys, values = x @ q, memory @ k, memory @ v
    return torch.softmax(queries @ keys.T / math.sqrt(keys.shape[1]), dim=-1) @ values


def multi_head(module: Attention, x: Tensor, memory: Tensor) -> Tensor:
    """(Z_1 ⊕ … ⊕ Z_H) W_o."""
    return torch.cat([head_output(module, x, memory, h) for h in range(module.heads)], 1) @ module.o.weight.T


def test_self_attention_of_one_head_is_its_formula() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Self-Attention (Attention Head)": Q = X W^Q, K = X W^K, V = X W^V,
    Z = softmax(Q K^T / √k) V."""
    module = Attention(Spec(query_dim=D, heads=1, bias=False))
    torch.testing.assert_close(module(X).values, head_output(module, X.values, X.values, 0) @ module.o.weight.T)


def test_self_attention_word_by_word_is_its_formula() -> None:
    """Sequence to Sequence models: Attention Models, "Self Attention": q_i = W_q h_i, k_i = W_k h_i, v_i = W_v h_i,
    w_ij = attn(q_i, k_0:N), o_i = Σ_j w_ij v_j."""
    module = Attention(Spec(query_dim=D, bias=False))
    q, k, v = ([w.weight @ h for h in X.values] for w in (module.q, module.k, module.v))
    rows = []
    for i in range(N):
        w = torch.softmax(torch.stack([q[i] @ k[j] for j in range(N)]) / math.sqrt(D), 0)
        rows.append(sum(w[j] * v[j] for j in range(N)))
    torch.testing.assert_close(module(X).values, torch.stack(rows) @ module.o.weight.T)


@pytest.mark.parametrize("heads", [2, 4])
def test_heads_are_joined_and_projected(heads: int) -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Multi-Head Attention": mh-att(X) = (Z_1 ⊕ … ⊕ Z_H) W^O; and
    (Even More) Language Modeling: Attention, "Multi-head Attention": Concat(head_1, …, head_h) W^O."""
    module = Attention(Spec(query_dim=D, heads=heads, bias=False))
    torch.testing.assert_close(module(X).values, multi_head(module, X.values, X.values))


def test_each_head_keeps_its_part_of_the_joined_output() -> None:
    """Sequence to Sequence models: Attention Models, "MULTI-HEAD ATTENTION": o_i = [o_i^1; o_i^2; …; o_i^H]."""
    module = Attention(Spec(query_dim=D, heads=2, bias=False))
    torch.nn.init.eye_(module.o.weight)
    torch.testing.assert_close(module(X).values[:, D // 2 :], head_output(module, X.values, X.values, 1))


def test_heads_are_independent_of_each_other() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Multi-Head Attention": "multiple attention heads, independent of
    each other"."""
    module = Attention(Spec(query_dim=D, heads=2, bias=False))
    torch.nn.init.eye_(module.o.weight)
    before = module(X).values[:, : D // 2]
    for linear in (module.q, module.k, module.v):
        linear.weight.data[D // 2 :] += 1  # the second head's
    torch.testing.assert_close(module(X).values[:, : D // 2], before)


def test_keys_and_values_of_cross_attention_come_from_the_encoder() -> None:
    """Transformers and Pretraining, 1.3 "Encoder-Decoder Attention": Q = X_target W_Q, K = X_source W_K,
    V = X_source W_V."""
    module = Attention(Spec(query_dim=D, heads=2, bias=False))
    source = Ragged.from_lengths(torch.randn(7, D), [7])
    torch.testing.assert_close(module(X, source).values, multi_head(module, X.values, source.values))


def test_query_key_and_value_need_not_have_the_inputs_size() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Self-Attention (Attention Head)": "Query, key, and value vectors
    are not necessarily of same length d as input emb.": W^Q, W^K are d x k, W^V is d x v, and W^O is (v·H) x d."""
    module = Attention(Spec(query_dim=D, heads=3, head_dim=2, v_head_dim=5, bias=False))
    q, k, v = (by_head(w, 3)[0].shape for w in (module.q, module.k, module.v))
    assert [tuple(shape) for shape in (q, k, v, module.o.weight.T.shape)] == [(D, 2), (D, 2), (D, 5), (15, D)]


def test_unequal_sizes_give_the_formula_too() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Multi-Head Attention": the join has N x (v·H) numbers, the output
    N x d."""
    module = Attention(Spec(query_dim=D, heads=3, head_dim=2, v_head_dim=5, bias=False))
    torch.testing.assert_close(module(X).values, multi_head(module, X.values, X.values))


def test_the_softmax_runs_over_keys_not_queries() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Self-Attention (Attention Head)": "softmax is applied row-wise on
    Q K^T / √k"."""
    module, seen = Attention(Spec(query_dim=D)), []
    module.hook = lambda weights, *_: seen.append(weights[0, 0])
    module(X)
    torch.testing.assert_close(seen[0].sum(1), torch.ones(N))
    assert not torch.allclose(seen[0].sum(0), torch.ones(N))


def test_heads_are_scaled_by_the_root_of_their_own_size() -> None:
    """Transformers and Pretraining, 1.2 "Encoder Attention" divides by √D also where D is cut into H heads of D/H; it
    is the size of a head's key that counts (Vaswani et al. 2017, 3.2.1: d_k)."""
    assert Attention(Spec(query_dim=D, heads=4)).score.scale == 1 / math.sqrt(D / 4)


def test_heads_are_consecutive_parts_of_the_width() -> None:
    """Transformers and Pretraining, 1.2 "Encoder Attention": "reshape and permute the matrix from shape B x L x D to
    B x H x L x D/H"."""
    module, heads = Attention(Spec(query_dim=D, heads=4, use_projections=False)), 4
    cut = X.values.view(1, N, heads, D // heads).transpose(1, 2)  # [B, H, L, D/H]
    weights = torch.softmax(cut @ cut.transpose(-1, -2) / math.sqrt(D // heads), -1)
    torch.testing.assert_close(module(X).values, (weights @ cut).transpose(1, 2).reshape(N, D))


def test_the_weights_come_from_keys_and_the_output_from_values() -> None:
    """Sequence to Sequence models: Attention Models, "Modification: Query key value": e_i(t) = g(k_i, q_t),
    w_i(t) = softmax(e_i(t)), "the actual context is a weighted sum of value"."""
    module, seen = Attention(Spec(query_dim=D, bias=False)), []
    module.hook = lambda weights, *_: seen.append(weights)
    once = module(X).values
    module.v.weight.data *= 2
    twice = module(X).values
    assert torch.equal(seen[0], seen[1])
    torch.testing.assert_close(twice, 2 * once)


def test_heads_of_a_recurrent_decoder_attend_to_their_own_part() -> None:
    """Sequence to Sequence models: Attention Models, "Extensions: Multihead attention": e_i^l(t) = g(k_i^l, q_t^l),
    C_t^l = Σ_i w_i^l(t) v_i^l."""
    module = Attention(Spec(query_dim=D, heads=2, score_fn="additive", use_projections=False))
    score, half = module.score, D // 2
    contexts = []
    for head, part in ((0, slice(half)), (1, slice(half, D))):
        states = X.values[:, part]
        hidden = torch.tanh((states @ score.from_key[head])[None] + (states @ score.from_query[head])[:, None])
        contexts.append(torch.softmax((hidden @ score.vector[head])[..., 0], -1) @ states)
    torch.testing.assert_close(module(X).values, torch.cat(contexts, 1))


def test_a_word_attends_to_words_by_their_match_with_its_own_query() -> None:
    """DS 4440 RNNs → Contextual embeddings → Transformers, "Transformers", on "Self attend to words": x̃_attend =
    Σ_j α_j^attend v_j with α^attend = SM(S(k_self, q_attend), S(k_attend, q_attend), S(k_to, …), S(k_words, …))."""
    words = Ragged.from_lengths(torch.randn(4, D), [4])
    module = Attention(Spec(query_dim=D, bias=False))
    k, v = words.values @ module.k.weight.T, words.values @ module.v.weight.T
    q_attend = words.values[1] @ module.q.weight.T
    alpha = torch.softmax(torch.stack([k_j @ q_attend / math.sqrt(D) for k_j in k]), 0)
    torch.testing.assert_close(module(words).values[1], (alpha @ v) @ module.o.weight.T)
