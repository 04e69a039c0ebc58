"""Relative attention of Transformer-XL and XLNet over packed batches (Dai et al. 2019, 3.3; Yang et al. 2019, 2).

The score of a query q_i and a key k_j is the sum of up to three terms, each with a learned bias on the query:

    content   (q_i + u) k_j
    position  (q_i + v) W_r R(i - j), where R are sinusoids of the distance
    segment   (q_i + w) s, where s is one of two vectors: same or another segment

All products are computed on padded buckets (`qkv.nn.bucketing`). The position term needs one product per query and
distance, N + M - 1 instead of N M; a view of its result that is shifted by one distance per query is the term of each
pair. Queries at other positions than the last of their sequence, as in XLNet's query stream, gather it instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError
from qkv.nn.attention import Attention
from qkv.nn.bucketing import BucketPlan, longest_row, pad_values
from qkv.nn.dropout import dropout
from qkv.nn.kernels import PairBias, PositionBias, attend_cached
from qkv.nn.kv_cache import KVCache
from qkv.nn.position import sinusoids_concat
from qkv.nn.ragged import Ragged

HIDDEN_RANK = 2**30  # rank of a key that no query attends to
_TABLE_STEP = 128  # tables of sinusoids are computed for multiples of this length

TokenPair = tuple[Tensor, Tensor]  # a value of each query [Tq] and of each key [Tk]


@dataclass
class SegmentedRagged(Ragged):
    """Hidden states with the segment of each token."""

    segments: Tensor  # [T]


@dataclass(eq=False)
class TokenPairs:
    """Positions, segments and order of the queries and keys of a batch, shared by all layers."""

    sinusoids: Tensor  # [2 L - 1, width] of the distances L - 1, …, 1 - L
    positions: TokenPair | None = None  # in the key sequence; None: the queries are its last tokens
    segments: TokenPair | None = None  # None: all tokens belong to one segment
    ranks: TokenPair | None = None  # a query attends to keys of at most its own rank; None: to all keys
    window: TokenPair | None = None  # positions; a query attends to keys above its own number; None: to all keys
    _cache: dict[tuple[str, int], tuple[list[Tensor], BucketPlan]] = field(default_factory=dict)

    def mask(self, bucket_plan: BucketPlan, bucket_index: int) -> Tensor | None:
        """Return a mask that is True where a query attends to a key; None: everywhere.  # [b, 1, N, M]"""
        # padded queries attend to all keys: a softmax over nothing is NaN
        known = self._compare("ranks", self.ranks, torch.ge, HIDDEN_RANK, bucket_plan, bucket_index)
        near = self._compare("window", self.window, torch.lt, -HIDDEN_RANK, bucket_plan, bucket_index)
        return near if known is None else known if near is None else known & near

    def other_segment(self, bucket_plan: BucketPlan, bucket_index: int) -> Tensor | None:
        """Return a mask that is True where query and key are of two segments; None: nowhere.  # [b, 1, N, M]"""
        return self._compare("segments", self.segments, torch.ne, 0, bucket_plan, bucket_index)

    def distances(self, bucket_plan: BucketPlan, bucket_index: int) -> Tensor | None:
        """Return the distance i - j of each pair; None: it follows from the slots.  # [b, 1, N, M]"""
        return self._compare("positions", self.positions, torch.sub, 0, bucket_plan, bucket_index)

    def _compare(
        self,
        name: str,
        values: TokenPair | None,
        comparison: Callable[[Tensor, Tensor], Tensor],
        fill_value: int,
        bucket_plan: BucketPlan,
        bucket_index: int,
    ) -> Tensor | None:
        """Compare a value of each query with that of each key; all layers use the result of the first one."""
        if values is None:
            return None
        cache_key = name, id(bucket_plan)
        if cache_key not in self._cache:
            queries, keys = (
                pad_values(values[0], bucket_plan, "query", fill_value),
                pad_values(values[1], bucket_plan, "key", fill_value),
            )
            compared = [comparison(q[:, None, :, None], k[:, None, None]) for q, k in zip(queries, keys, strict=True)]
            self._cache[cache_key] = compared, bucket_plan  # a reference keeps its id from being reused
        return self._cache[cache_key][0][bucket_index]


class RelativeAttention(Attention):
    """Multi-head attention with a term per distance, and optionally one per segment."""

    def __init__(self, s: spec.Attention):
        super().__init__(s)
        assert s.relative_positions is not None
        if s.score_fn not in ("scaled_dot", "dot") or not s.use_projections:
            raise InputError("attention.relative_positions: needs projections and a dot product as score_fn")
        self.r = nn.Linear(s.query_dim, s.heads * s.q_head_dim, bias=False)
        self.content_bias = nn.Parameter(torch.empty(s.heads, s.q_head_dim))
        self.position_bias = nn.Parameter(torch.empty(s.heads, s.q_head_dim))
        self.segment_bias: nn.Parameter | None = None
        self.segment_embedding: nn.Parameter | None = None  # rows: same segment, another segment
        if s.relative_positions.segments:
            self.segment_bias = nn.Parameter(torch.empty(s.heads, s.q_head_dim))
            self.segment_embedding = nn.Parameter(torch.empty(2, s.heads, s.q_head_dim))
        self._distance_keys: tuple[int, int, Tensor] | None = None  # of `step`: version of the weights, length, keys
        self.init_weights(None)

    def init_weights(self, std: float | None) -> None:
        """Draw the biases and the segment vectors; projections are initialized like any other matrix."""
        for parameter in self.parameters(recurse=False):
            nn.init.normal_(parameter, std=std or 0.02)

    def project_q(self, x: Tensor) -> Tensor:
        """Return the queries of the content term, which include its bias."""
        q = super().project_q(x)
        return q + self.content_bias.to(q.dtype)  # [T, H, query]

    def fuse_qkv(self) -> None:
        """Do nothing: queries have a bias that keys and values have not."""

    def step(self, x: Tensor, cache: KVCache, bias: PositionBias | None = None) -> Tensor:  # noqa: ARG002
        """Causal self-attention of one new token per row.  # [R, width] -> [R, output]"""
        q, (k, v) = self.project_q(x), self.project_kv(x)  # [R, H, size]
        kv = cache.append(k, v)
        assert self.spec.relative_positions is not None
        window = self.spec.relative_positions.window
        if window is not None:
            kv = kv.last_keys(window)
        num_keys = kv.keys.shape[2]
        shift = (self.position_bias - self.content_bias).to(q.dtype)
        terms = (q + shift)[:, :, None] * self.score.scale @ self._step_keys(num_keys, q)  # [R, H, 1, M]

        def position_terms(
            num_queries: int,  # noqa: ARG001
            num_keys: int,  # noqa: ARG001
            offset: int = 0,  # noqa: ARG001
            queries: Tensor | None = None,  # noqa: ARG001
        ) -> Tensor:
            return terms

        out = attend_cached(q[:, :, None], kv, score=self.score, bias=position_terms, hook=self.hook)
        return self.merge_heads(out.squeeze(2))

    def _step_keys(self, num_keys: int, like: Tensor) -> Tensor:
        """Return the keys of the distances num_keys - 1, …, 0, computed once for many steps.  # [H, size, M]"""
        version = self.r.weight._version if not self.r.weight.is_inference() else 0
        if self._distance_keys is None or self._distance_keys[0] != version or self._distance_keys[1] < num_keys:
            sinusoids = relative_sinusoids(num_keys, self.spec, like.device)
            length = (len(sinusoids) + 1) // 2
            keys = self._split(sinusoids[:length].to(like.dtype), self.r).permute(1, 2, 0)  # [H, size, L]
            self._distance_keys = version, length, keys
        return self._distance_keys[2][:, :, -num_keys:]

    def project_positions(self, pairs: TokenPairs) -> Tensor:
        """Return the keys of the distances.  # [2 L - 1, H, query]"""
        return self._split(pairs.sinusoids.to(self.r.weight.dtype), self.r)

    def pair_bias(self, pairs: TokenPairs, distance_keys: Tensor | None = None) -> PairBias:
        """Return the position and segment terms of a batch.

        Args:
            pairs: the positions, segments and order of its tokens.
            distance_keys: the result of `project_positions`, if it is known.
        """
        return _RelativeBias(self, pairs, self.project_positions(pairs) if distance_keys is None else distance_keys)


class _RelativeBias(PairBias):
    """Position and segment terms of one layer."""

    def __init__(self, attention: RelativeAttention, pairs: TokenPairs, distance_keys: Tensor):
        self.attention, self.pairs = attention, pairs
        self.distance_keys = distance_keys.permute(1, 2, 0)  # [H, query, 2 L - 1]
        self.aligned = pairs.positions is None

    def __call__(self, bucket_plan: BucketPlan, bucket_index: int, queries: Tensor) -> tuple[Tensor, Tensor | None]:
        attention, bucket = self.attention, bucket_plan.buckets[bucket_index]
        num_queries, num_keys = bucket.query_length, bucket.key_length
        zero_distance = self.distance_keys.shape[-1] // 2  # index of the distance 0
        distances = self.pairs.distances(bucket_plan, bucket_index)
        if distances is None:
            first, count = zero_distance - (bucket.offset + num_queries - 1), num_queries + num_keys - 1
        else:
            first, count = zero_distance - (num_keys - 1), 2 * num_keys - 1
        shift = attention.position_bias - attention.content_bias  # the queries have the content term's bias
        position_queries = (queries + shift.to(queries.dtype)[:, None]) * attention.score.scale
        by_distance = position_queries @ self.distance_keys[..., first : first + count]  # [b, H, N, count]
        if distances is None:
            bias = shift_by_query(by_distance, num_keys)
        else:
            index = ((num_keys - 1) - distances).clamp(0, count - 1)
            bias = by_distance.gather(-1, index.expand(-1, attention.heads, -1, -1))
        other_segment = self.pairs.other_segment(bucket_plan, bucket_index)
        if other_segment is not None:
            bias = bias + self._segment_term(queries) * other_segment.to(bias.dtype)
        return bias.to(queries.dtype), self.pairs.mask(bucket_plan, bucket_index)

    def _segment_term(self, queries: Tensor) -> Tensor:
        """Return by how much the score of a key changes if it is of another segment.  # [b, H, N, 1]

        The term of the own segment is the same for all keys of a query, so that it cancels in the softmax.
        """
        attention = self.attention
        assert attention.segment_bias is not None
        assert attention.segment_embedding is not None
        shift = attention.segment_bias - attention.content_bias
        difference = (attention.segment_embedding[1] - attention.segment_embedding[0]).to(queries.dtype)  # [H, query]
        segment_queries = (queries + shift.to(queries.dtype)[:, None]) * attention.score.scale
        return segment_queries @ difference[:, :, None]


def shift_by_query(by_distance: Tensor, num_keys: int) -> Tensor:
    """Turn terms per distance into terms per key, for queries at consecutive positions.

    Columns are distances in descending order, from that of the last query and the first key: query i of N begins at
    column N - 1 - i.  # [..., N, N + M - 1] -> [..., N, M]
    """
    num_queries, count = by_distance.shape[-2:]
    if num_queries == 1:
        return by_distance
    # rows that are one element shorter begin one column further to the left each
    flat = by_distance.flatten(-2)[..., num_queries - 1 : num_queries - 1 + num_queries * (count - 1)]
    return flat.view(*flat.shape[:-1], num_queries, count - 1)[..., :num_keys]


def relative_sinusoids(max_length: int, s: spec.Attention, device: torch.device, dropout_prob: float = 0.0) -> Tensor:
    """Return the sinusoids of all distances in sequences of at most `max_length` keys, in descending order.

    # [2 L - 1, width]
    """
    assert s.relative_positions is not None
    length = longest_row(max_length)
    table_length = -(-length // _TABLE_STEP) * _TABLE_STEP
    table = _sinusoid_table(table_length, s.query_dim, s.relative_positions.max_distance, device)
    table = table[table_length - length : table_length + length - 1]
    return dropout(table, dropout_prob) if dropout_prob else table


@lru_cache(maxsize=8)
def _sinusoid_table(length: int, width: int, max_distance: int | None, device: torch.device) -> Tensor:
    """Return the sinusoids of the distances length - 1, …, 1 - length.  # [2 length - 1, width]"""
    with torch.inference_mode(False):  # a tensor of inference mode could not be used in training later
        distances = torch.arange(length - 1, -length, -1)
        if max_distance is not None:
            distances = distances.clamp(-max_distance, max_distance)
        table = sinusoids_concat(length, width)[distances.abs()]
        table[:, : (width + 1) // 2] *= torch.where(distances < 0, -1.0, 1.0)[:, None]  # the sine is odd
        return table.to(device)


def build_attention(s: spec.Attention) -> Attention:
    """Build self-attention with the position scheme of its spec."""
    return Attention(s) if s.relative_positions is None else RelativeAttention(s)
