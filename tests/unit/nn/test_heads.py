from __future__ import annotations

import pytest
import torch

from qkv import spec
from qkv.nn import Ragged
from qkv.nn.heads import AttentionPool, Head
from qkv.spec import Attention

HIDDEN = Ragged.of(torch.randn(9, 6, generator=torch.Generator().manual_seed(1)), [4, 1, 4])


def test_attention_pooling_is_a_softmax_weighted_sum_of_the_states() -> None:
    pool = AttentionPool(Attention(width=6, score="dot", project=False))
    naive = [torch.softmax(h @ pool.query, 0) @ h for h in HIDDEN.sequences()]
    torch.testing.assert_close(pool(HIDDEN), torch.stack(naive))


def test_attention_pooling_with_several_heads_pools_each_part_by_its_own_weights() -> None:
    pool = AttentionPool(Attention(width=6, heads=2, score="dot", project=False))
    naive = [
        torch.cat([torch.softmax(h[:, part] @ pool.query[part], 0) @ h[:, part] for part in (slice(3), slice(3, 6))])
        for h in HIDDEN.sequences()
    ]
    torch.testing.assert_close(pool(HIDDEN), torch.stack(naive))


@pytest.mark.parametrize("score", ["scaled_dot", "bilinear", "additive", "mlp"])
def test_a_pooled_sequence_does_not_depend_on_its_batch_mates(score: str) -> None:
    pool = AttentionPool(Attention(width=6, heads=2, score=score, project=False))
    alone = torch.cat([pool(Ragged.pack([h])) for h in HIDDEN.sequences()])
    torch.testing.assert_close(pool(HIDDEN), alone)


def test_a_sequence_head_without_pool_reads_the_first_token() -> None:
    head = Head(spec.Head(kind="sequence", width=6, outputs=3, bias=True))
    firsts = torch.stack([h[0] for h in HIDDEN.sequences()])
    torch.testing.assert_close(head(HIDDEN), head.linear(firsts))


def test_a_sequence_head_with_pool_reads_the_pooled_vector() -> None:
    pool = Attention(width=6, score="additive", project=False)
    head = Head(spec.Head(kind="sequence", width=6, outputs=3, pool=pool))
    assert head.pool is not None
    torch.testing.assert_close(head(HIDDEN), head.linear(head.pool(HIDDEN)))


def test_a_language_model_head_is_one_linear_map_for_each_token() -> None:
    head = Head(spec.Head(kind="lm", width=6, outputs=3, bias=True))
    naive = torch.stack([head.linear.weight @ h + head.linear.bias for h in HIDDEN.values])
    torch.testing.assert_close(head(HIDDEN.values), naive)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "lm", "bias": True},
        {"kind": "lm", "offset": True, "scale": 0.5},
        {"kind": "lm", "dense": "gelu", "norm": spec.Norm(), "bias": True},
        {"kind": "sequence", "pool": "last", "dense": "tanh"},
        {"kind": "pooler", "dense": "tanh"},
    ],
)
def test_a_head_is_its_last_layer_over_the_rows_that_this_reads(fields: dict[str, object]) -> None:
    head = Head(spec.Head(width=6, outputs=3, **fields))
    if head.offset is not None:
        head.offset.normal_()
    assert torch.equal(head.last(head.rows(HIDDEN)), head(HIDDEN))


def test_rows_are_dropped_and_scaled_before_the_last_layer() -> None:
    head = Head(spec.Head(kind="lm", width=6, outputs=3, dropout=0.5, scale=2.0))
    rows = head.rows(HIDDEN)
    kept = rows != 0
    assert 0 < int(kept.sum()) < kept.numel()
    torch.testing.assert_close(rows[kept], 4 * HIDDEN.values[kept])  # twice for the scale, twice for what was dropped
    torch.testing.assert_close(head.eval().rows(HIDDEN), 2 * HIDDEN.values)
