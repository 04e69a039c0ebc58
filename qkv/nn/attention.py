"""Multi-head attention as a module: projections and cache around `attend` (Vaswani et al. 2017, 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError
from qkv.nn.attention_score import build_score
from qkv.nn.indexed_cache import IndexedKVCache
from qkv.nn.kernels import AttentionHook, PositionBias, ScoreBias, attend, attend_cached
from qkv.nn.kv_cache import KeyValues, KVCache
from qkv.nn.mask import Bidirectional, Mask
from qkv.nn.ragged import BatchLayout, Ragged

_BIDIRECTIONAL = Bidirectional()


class Attention(nn.Module):
    """Multi-head self- or cross-attention.

    It serves the Transformer (projections, scaled dot product) and the recurrent decoder (no projections, any score).
    """

    def __init__(self, s: spec.Attention):
        super().__init__()
        if s.heads < 1:
            raise InputError(f"attention: needs at least one head, not {s.heads}")
        for width in (
            (s.query_dim, s.effective_kv_dim) if not s.use_projections else (s.query_dim,) if s.head_dim is None else ()
        ):
            if width % s.heads:
                raise InputError(f"attention: a width of {width} does not divide into {s.heads} heads")
        self.spec = s
        self.heads = s.heads
        self.score = build_score(s)
        self.hook: AttentionHook | None = None  # receives the weights while they are recorded (qkv.nn.capture)
        self.q = self.k = self.v = self.o = None
        self.qkv: nn.Linear | None = None  # the three projections in one; see `fuse_qkv`
        if s.use_projections:
            self.q = nn.Linear(s.query_dim, s.heads * s.q_head_dim, bias=s.bias)
            self.k = nn.Linear(s.effective_kv_dim, s.heads * s.k_head_dim, bias=s.bias)
            self.v = nn.Linear(s.effective_kv_dim, s.heads * s.effective_v_head_dim, bias=s.bias)
            output_bias = s.bias if s.output_bias is None else s.output_bias
            self.o = nn.Linear(s.heads * s.effective_v_head_dim, s.query_dim, bias=output_bias)

    def forward(
        self,
        x: Ragged,
        key_value_states: Ragged | None = None,
        mask: Mask = _BIDIRECTIONAL,
        bias: PositionBias | None = None,
        cache: KVCache | None = None,
    ) -> Ragged:
        """Attend to the input itself, or to `key_value_states`.  # [T, width] -> [T, output]

        With a causal mask `key_value_states` may hold a memory before the input: more keys than queries per sequence.
        A cache is filled with the keys and values.
        """
        kv_input = x if key_value_states is None else key_value_states
        q, k, v = self.project_q(x.values), *self.project_kv(kv_input.values)
        return x.with_values(self.merge_heads(self.attend_heads(q, k, v, x.layout, kv_input.layout, mask, bias, cache)))

    def project_q(self, x: Tensor) -> Tensor:
        """Return the queries of each head."""
        return self._split(x, self.q)  # [T, H, query]

    def project_kv(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of each head."""
        return self._split(x, self.k), self._split(x, self.v)  # [T, H, key], [T, H, value]

    def attend_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_layout: BatchLayout,
        key_layout: BatchLayout,
        mask: Mask = _BIDIRECTIONAL,
        bias: ScoreBias | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return the output of each head, before `merge_heads`.  # [T, H, value]"""
        if cache is not None:
            precomputed_keys = self.score.precompute_keys(k.transpose(0, 1)).transpose(0, 1)
            cache.prefill(Ragged(precomputed_keys, key_layout), Ragged(v, key_layout))
        dropout, hook = self._dropout, self.hook
        return attend(
            q, k, v, query_layout, key_layout, score=self.score, mask=mask, bias=bias, dropout=dropout, hook=hook
        )

    def project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of self-attention, in one product if they are fused.  # [T, H, size]"""
        if self.qkv is None:
            return self.project_q(x), *self.project_kv(x)
        projected = self.qkv(x).view(x.shape[0], 3, self.heads, -1)
        return projected[:, 0], projected[:, 1], projected[:, 2]

    def fuse_qkv(self) -> None:
        """Replace the three projections of self-attention by one, if their heads have the same size."""
        s = self.spec
        if self.q is None or self.k is None or self.v is None or s.effective_kv_dim != s.query_dim:
            return
        if not s.q_head_dim == s.k_head_dim == s.effective_v_head_dim:
            return
        projections = self.q, self.k, self.v
        weight = torch.cat([projection.weight for projection in projections])
        self.qkv = nn.Linear(weight.shape[1], weight.shape[0], bias=s.bias, device="meta")
        self.qkv.weight = nn.Parameter(weight, requires_grad=False)
        if s.bias:
            bias = torch.cat([projection.bias for projection in projections])
            self.qkv.bias = nn.Parameter(bias, requires_grad=False)

    def merge_heads(self, heads: Tensor) -> Tensor:
        """Concatenate the heads and apply the output projection.  # [T, H, value] -> [T, output]"""
        merged = heads.flatten(1)  # [T, H * value]
        return merged if self.o is None else self.o(merged)

    def precompute_kv(self, key_value_states: Ragged) -> KeyValues:
        """Return the keys and values of whole sequences, computed once for all decoding steps."""
        layout = key_value_states.layout
        projected = self.project_kv(key_value_states.values)
        k, v = (
            key_value_states.with_values(x).to_padded().transpose(1, 2) for x in projected
        )  # [B, H, M, key], [B, H, M, value]
        is_uniform = min(layout.lengths_list) == layout.max_length
        mask = None if is_uniform else layout.valid_mask()[:, None, None]
        # contiguous per head, because every step reads them
        return KeyValues(self.score.precompute_keys(k).contiguous(), v.contiguous(), mask, layout.lengths_list)

    def attend_precomputed(self, x: Tensor, kv: KeyValues, row_ids: Sequence[int] | None = None) -> Tensor:
        """Attend to precomputed keys and values; beams of a source are adjacent rows.  # [R, width] -> [R, output]"""
        num_sources = kv.keys.shape[0]
        q = self.project_q(x)  # [R, H, query]
        q = q.view(num_sources, -1, self.heads, q.shape[-1]).transpose(1, 2)  # [B, H, beams, query]
        out = attend_cached(q, kv, score=self.score, dropout=self._dropout, hook=self.hook, row_ids=row_ids)
        return self.merge_heads(out.transpose(1, 2).flatten(0, 1))  # [R, output]

    def new_cache(self, num_rows: int, max_length: int, like: Tensor) -> KVCache:
        """Return an empty cache for self-attention, with the device and dtype of `like`."""
        s = self.spec
        return KVCache(num_rows, s.heads, max_length, self.score.precomputed_dim, s.effective_v_head_dim, like)

    def step(self, x: Tensor, cache: KVCache, bias: PositionBias | None = None) -> Tensor:
        """Causal self-attention of one new token per row.  # [R, width] -> [R, output]"""
        q, k, v = self.project_qkv(x)  # [R, H, size]
        if isinstance(cache, IndexedKVCache):
            return self.merge_heads(cache.attend(q, k, v, self.score.scale))
        kv = cache.append(self.score.precompute_keys(k.unsqueeze(-2)).squeeze(-2), v)
        out = attend_cached(q.unsqueeze(2), kv, score=self.score, bias=bias, dropout=self._dropout, hook=self.hook)
        return self.merge_heads(out.squeeze(2))

    @property
    def _dropout(self) -> float:
        return self.spec.dropout if self.training else 0.0

    def _split(self, x: Tensor, projection: nn.Linear | None) -> Tensor:
        projected = x if projection is None else projection(x)
        return projected.view(x.shape[0], self.heads, -1)  # [T, H, size]
