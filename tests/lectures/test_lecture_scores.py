"""How a query is compared with a key: the score functions of the decks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qkv.nn.attention_score import AttentionScore, build_score
from qkv.spec import Attention


def score_of(kind: str, query: int = 4, key: int = 4, hidden: int | None = None) -> AttentionScore:
    return build_score(
        Attention(query_dim=query, kv_dim=key, score_fn=kind, score_hidden_dim=hidden, use_projections=False)
    )


def compared(score: AttentionScore, h: Tensor, s: Tensor) -> Tensor:
    """g(h, s) for one h and one s."""
    return score(s[None, None], score.precompute_keys(h[None, None])).squeeze()


def test_dot_score_is_h_transposed_s() -> None:
    """Sequence to Sequence models: Attention Models, "Attention weights": g(h_i, s_(t-1)) = h_i^T s_(t-1)."""
    h, s = torch.tensor([1.0, 2.0, -1.0, 0.5]), torch.tensor([3.0, 0.0, 1.0, 4.0])
    assert compared(score_of("dot"), h, s) == 4.0  # 3 + 0 - 1 + 2


def test_bilinear_score_is_h_transposed_w_s() -> None:
    """Sequence to Sequence models: Attention Models, "Attention weights": g(h_i, s_(t-1)) = h_i^T W_g s_(t-1)."""
    score, h, s = score_of("bilinear", query=3, key=4), torch.randn(4), torch.randn(3)
    naive = sum(h[a] * score.matrix[0, a, b] * s[b] for a in range(4) for b in range(3))
    torch.testing.assert_close(compared(score, h, s), naive)


def joint_matrix(score: AttentionScore) -> Tensor:
    """W_g of W_g [h; s]: the two matrices side by side.  # [hidden, key + query]"""
    return torch.cat([score.from_key[0].T, score.from_query[0].T], dim=1)


def test_additive_score_is_v_tanh_of_w_over_h_joined_with_s() -> None:
    """Sequence to Sequence models: Attention Models, "Attention weights": g(h, s) = v_g^T tanh(W_g [h; s])."""
    score, h, s = score_of("additive", query=3, key=4, hidden=6), torch.randn(4), torch.randn(3)
    slide = score.vector[0, :, 0] @ torch.tanh(joint_matrix(score) @ torch.cat([h, s]))
    torch.testing.assert_close(compared(score, h, s), slide)


def test_additive_score_takes_key_first_then_query() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Attention Mechanism": s(q, k) = v_a tanh(W_a (k ⊕ q)), where k and
    q may be of different length and W_a is h x (K + Q)."""
    score = score_of("additive", query=3, key=4, hidden=6)
    assert joint_matrix(score).shape == (6, 4 + 3)


def test_the_two_forms_of_the_additive_score_are_equal() -> None:
    """DS 4440 RNNs → Contextual embeddings → Transformers, "Self-Attention": v^T tanh(W_k k_j + W_q q) ("MLP ATTN") is
    v^T tanh(W [k; q]) of the other decks with W = [W_k W_q]."""
    score, k, q = score_of("additive", query=3, key=4, hidden=6), torch.randn(4), torch.randn(3)
    split = score.vector[0, :, 0] @ torch.tanh(score.from_key[0].T @ k + score.from_query[0].T @ q)
    joined = score.vector[0, :, 0] @ torch.tanh(joint_matrix(score) @ torch.cat([k, q]))
    torch.testing.assert_close(split, joined)
    torch.testing.assert_close(compared(score, k, q), split)


def test_mlp_score_is_a_perceptron_over_h_joined_with_s() -> None:
    """Sequence to Sequence models: Attention Models, "Attention weights": g(h_i, s_(t-1)) = MLP([h_i, s_(t-1)])."""
    score, h, s = score_of("mlp", query=3, key=4, hidden=6), torch.randn(4), torch.randn(3)
    for parameter in score.parameters():
        torch.nn.init.normal_(parameter)
    first = torch.relu(joint_matrix(score) @ torch.cat([h, s]) + score.bias[0, 0, 0])
    second = torch.relu(score.hidden_weight[0].T @ first + score.hidden_bias[0, 0, 0])
    torch.testing.assert_close(compared(score, h, s), score.vector[0, :, 0] @ second)


def test_scaled_dot_score_divides_by_the_root_of_the_size() -> None:
    """DS 4440 RNNs → Contextual embeddings → Transformers, "Self-Attention": (k_j · q) / √d, "scale by dims"."""
    h, s = torch.tensor([1.0, 2.0, -1.0, 0.5]), torch.tensor([3.0, 0.0, 1.0, 4.0])
    assert compared(score_of("scaled_dot"), h, s) == 4.0 / math.sqrt(4)


def test_the_dot_score_has_nothing_to_learn() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Attention Mechanism": dot-product attention has a
    "non-parametrized scoring function"."""
    assert not list(score_of("dot").parameters())


def test_only_the_variables_in_red_are_learned() -> None:
    """Sequence to Sequence models: Attention Models, "Attention weights": "variables in red must learned": W_g for the
    bilinear score; v_g and W_g (here its two halves) for the additive one."""
    assert {name for name, _ in score_of("bilinear").named_parameters()} == {"matrix"}
    assert {name for name, _ in score_of("additive").named_parameters()} == {"from_key", "from_query", "vector"}


def spread(kind: str, size: int) -> float:
    q, k = torch.randn(1, 300, size), torch.randn(1, 300, size)
    return float(score_of(kind, query=size, key=size)(q, k).var())


def test_scaling_by_root_k_keeps_unit_variance() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Self-Attention (Attention Head)": "Why normalization with √k?":
    q·k of unit normal vectors has variance k, q·k / √k has variance 1."""
    for size in (4, 64, 512):
        assert 0.8 < spread("scaled_dot", size) < 1.2
        assert 0.8 * size < spread("dot", size) < 1.2 * size


def test_scaling_by_k_would_not_keep_unit_variance() -> None:
    """(Even More) Language Modeling: Attention, "'Attention Is All You Need' Description of Attention (advanced)"
    prints softmax(1/d_k Q K^T) V, a slip for 1/√d_k: the variance would be 1/d_k, and the softmax nearly flat."""
    q, k = torch.randn(1, 300, 64), torch.randn(1, 300, 64)
    as_printed = score_of("dot", 64, 64)(q, k) / 64
    assert float(as_printed.var()) < 1.2 / 64
    torch.testing.assert_close(score_of("scaled_dot", 64, 64)(q, k), as_printed * math.sqrt(64))
