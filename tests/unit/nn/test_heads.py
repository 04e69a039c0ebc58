from __future__ import annotations

import pytest
import torch

from qkv import spec
from qkv.nn import BatchLayout, Ragged
from qkv.nn.heads import AttentionPool, Head
from qkv.spec import Attention

HIDDEN = Ragged.from_lengths(torch.randn(9, 6, generator=torch.Generator().manual_seed(1)), [4, 1, 4])


def test_attention_pooling_is_a_softmax_weighted_sum_of_the_states() -> None:
    pool = AttentionPool(Attention(query_dim=6, score_fn="dot", use_projections=False))
    naive = [torch.softmax(h @ pool.query, 0) @ h for h in HIDDEN.sequences()]
    torch.testing.assert_close(pool(HIDDEN), torch.stack(naive))


def test_attention_pooling_with_several_heads_pools_each_part_by_its_own_weights() -> None:
    pool = AttentionPool(Attention(query_dim=6, heads=2, score_fn="dot", use_projections=False))
    naive = [
        torch.cat([torch.softmax(h[:, part] @ pool.query[part], 0) @ h[:, part] for part in (slice(3), slice(3, 6))])
        for h in HIDDEN.sequences()
    ]
    torch.testing.assert_close(pool(HIDDEN), torch.stack(naive))


@pytest.mark.parametrize("score", ["scaled_dot", "bilinear", "additive", "mlp"])
def test_a_pooled_sequence_does_not_depend_on_its_batch_mates(score: str) -> None:
    pool = AttentionPool(Attention(query_dim=6, heads=2, score_fn=score, use_projections=False))
    alone = torch.cat([pool(Ragged.pack([h])) for h in HIDDEN.sequences()])
    torch.testing.assert_close(pool(HIDDEN), alone)


def test_a_sequence_head_without_pool_reads_the_first_token() -> None:
    head = Head(spec.Head(kind="sequence", d_model=6, num_outputs=3, bias=True))
    firsts = torch.stack([h[0] for h in HIDDEN.sequences()])
    torch.testing.assert_close(head(HIDDEN), head.linear(firsts))


def test_mean_pooling_reads_the_mean_of_the_states_of_each_sequence() -> None:
    head = Head(spec.Head(kind="sequence", d_model=6, num_outputs=3, bias=True, pool="mean"))
    means = torch.stack([h.mean(0) for h in HIDDEN.sequences()])
    torch.testing.assert_close(head(HIDDEN), head.linear(means))
    assert head.pooled_token is None


def test_the_mean_of_a_sequence_is_the_same_number_in_every_batch() -> None:
    alone = torch.cat([Ragged.pack([h]).mean() for h in HIDDEN.sequences()])
    assert torch.equal(HIDDEN.mean(), alone)


def test_the_mean_follows_the_lengths_that_a_cuda_graph_is_replayed_with() -> None:
    static = Ragged(HIDDEN.values, BatchLayout([3, 3, 3]).mark_static())
    static.mean()
    assert static.layout.can_copy_from
    static.layout.copy_from(HIDDEN.layout)
    assert torch.equal(static.mean(), HIDDEN.mean())


def test_a_sequence_head_with_pool_reads_the_pooled_vector() -> None:
    pool = Attention(query_dim=6, score_fn="additive", use_projections=False)
    head = Head(spec.Head(kind="sequence", d_model=6, num_outputs=3, pool=pool))
    assert head.pool is not None
    torch.testing.assert_close(head(HIDDEN), head.linear(head.pool(HIDDEN)))


def test_a_language_model_head_is_one_linear_map_for_each_token() -> None:
    head = Head(spec.Head(kind="lm", d_model=6, num_outputs=3, bias=True))
    naive = torch.stack([head.linear.weight @ h + head.linear.bias for h in HIDDEN.values])
    torch.testing.assert_close(head(HIDDEN.values), naive)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "lm", "bias": True},
        {"kind": "lm", "final_logits_bias": True, "input_scale": 0.5},
        {"kind": "lm", "dense_activation": "gelu", "norm": spec.Norm(), "bias": True},
        {"kind": "sequence", "pool": "last", "dense_activation": "tanh"},
        {"kind": "pooler", "dense_activation": "tanh"},
    ],
)
def test_a_head_is_its_last_layer_over_the_rows_that_this_reads(fields: dict[str, object]) -> None:
    head = Head(spec.Head(d_model=6, num_outputs=3, **fields))
    if head.final_logits_bias is not None:
        head.final_logits_bias.normal_()
    assert torch.equal(head.compute_logits(head.compute_features(HIDDEN)), head(HIDDEN))


def test_rows_are_dropped_and_scaled_before_the_last_layer() -> None:
    head = Head(spec.Head(kind="lm", d_model=6, num_outputs=3, dropout=0.5, input_scale=2.0))
    rows = head.compute_features(HIDDEN)
    kept = rows != 0
    assert 0 < int(kept.sum()) < kept.numel()
    torch.testing.assert_close(rows[kept], 4 * HIDDEN.values[kept])  # twice for the scale, twice for what was dropped
    torch.testing.assert_close(head.eval().compute_features(HIDDEN), 2 * HIDDEN.values)
