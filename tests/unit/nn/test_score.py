from __future__ import annotations

import pytest
import torch
from naive import raw_score

from qkv.nn.attention_score import AttentionScore, build_score
from qkv.spec import Attention

KINDS = ["dot", "scaled_dot", "bilinear", "additive", "mlp"]


def score_of(kind: str, heads: int, query: int, key: int, hidden: int | None = None) -> AttentionScore:
    spec = Attention(
        query_dim=heads * query,
        kv_dim=heads * key,
        heads=heads,
        score_fn=kind,
        score_hidden_dim=hidden,
        use_projections=False,
    )
    score = build_score(spec).double()
    for parameter in score.parameters():  # biases start at zero, and a zero hides mistakes
        torch.nn.init.normal_(parameter)
    return score


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "hidden"), [(1, None), (3, None), (2, 7)])
def test_a_score_is_its_formula_for_every_pair(kind: str, heads: int, hidden: int | None) -> None:
    query, key = (4, 4) if "dot" in kind else (4, 3)
    score = score_of(kind, heads, query, key, hidden)
    q, k = torch.randn(heads, 5, query).double(), torch.randn(heads, 6, key).double()
    pairs = [raw_score(score, h, q[h, i], k[h, j]) for h in range(heads) for i in range(5) for j in range(6)]
    naive = torch.stack(pairs).view(heads, 5, 6)
    torch.testing.assert_close(score(q, score.precompute_keys(k)), naive)


@pytest.mark.parametrize("kind", ["additive", "mlp"])
def test_score_width_is_the_hidden_width(kind: str) -> None:
    assert score_of(kind, 2, 4, 3, hidden=9).from_key.shape == (2, 3, 9)


@pytest.mark.parametrize("kind", ["dot", "scaled_dot"])
def test_a_dot_product_of_unequal_sizes_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=r"queries \(4\) and keys \(3\)"):
        score_of(kind, 1, 4, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_only_scores_that_are_dot_products_go_to_fused_kernels(kind: str) -> None:
    assert score_of(kind, 1, 4, 4).is_dot == (kind in ("dot", "scaled_dot", "bilinear"))


@pytest.mark.parametrize("kind", KINDS)
def test_prepared_size_is_the_size_of_prepared_keys(kind: str) -> None:
    query, key = (4, 4) if "dot" in kind else (4, 3)
    score = score_of(kind, 2, query, key, hidden=6)
    assert score.precompute_keys(torch.randn(2, 5, key).double()).shape[-1] == score.precomputed_dim
