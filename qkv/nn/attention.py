"""Attention as a module: projections and cache around `attend` (Vaswani et al. 2017, 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError
from qkv.nn.attend import Bias, Sink, attend, attend_keys
from qkv.nn.cache import Cache, Keys
from qkv.nn.mask import Full, Mask
from qkv.nn.ragged import Layout, Ragged
from qkv.nn.score import Score

_FULL = Full()


class Attention(nn.Module):
    """Queries from one sequence, keys and values from the same one or from another; several heads.

    One module serves the Transformer (projected, scaled dot) and the recurrent decoder (states as they are, any score).
    """

    def __init__(self, s: spec.Attention):
        super().__init__()
        if s.heads < 1:
            raise InputError(f"attention needs at least one head, not {s.heads}")
        for width in (s.width, s.memory_width) if not s.project else (s.width,) if s.key is None else ():
            if width % s.heads:
                raise InputError(f"a width of {width} does not divide into {s.heads} heads")
        self.spec = s
        self.heads = s.heads
        self.score = Score(s)
        self.sink: Sink | None = None  # set while somebody watches; see qkv.look.capture
        self.q = self.k = self.v = self.o = None
        if s.project:
            self.q = nn.Linear(s.width, s.heads * s.query_size, bias=s.bias)
            self.k = nn.Linear(s.memory_width, s.heads * s.key_size, bias=s.bias)
            self.v = nn.Linear(s.memory_width, s.heads * s.value_size, bias=s.bias)
            back = s.bias if s.output_bias is None else s.output_bias
            self.o = nn.Linear(s.heads * s.value_size, s.width, bias=back)

    def forward(
        self,
        x: Ragged,
        memory: Ragged | None = None,
        mask: Mask = _FULL,
        bias: Bias | None = None,
        cache: Cache | None = None,
    ) -> Ragged:
        """Self-attention, or cross-attention to a memory; a cache is filled.  # [T, width] -> [T, output]"""
        looked_at = x if memory is None else memory
        q, k, v = self.queries(x.values), *self.keys_and_values(looked_at.values)
        return x.like(self.join(self.mix(q, k, v, x.layout, looked_at.layout, mask, bias, cache)))

    def queries(self, x: Tensor) -> Tensor:
        return self._split(x, self.q)  # [T, H, query]

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._split(x, self.k), self._split(x, self.v)  # [T, H, key], [T, H, value]

    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        asking: Layout,
        looked_at: Layout,
        mask: Mask = _FULL,
        bias: Bias | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """The heads' answers, before they are joined.  # [T, H, value]"""
        if cache is not None:
            prepared = self.score.prepare(k.transpose(0, 1)).transpose(0, 1)
            cache.fill(Ragged(prepared, looked_at), Ragged(v, looked_at))
        drop, sink = self._dropout, self.sink
        return attend(q, k, v, asking, looked_at, score=self.score, mask=mask, bias=bias, dropout=drop, sink=sink)

    def join(self, heads: Tensor) -> Tensor:
        joined = heads.flatten(1)  # [T, H * value]
        return joined if self.o is None else self.o(joined)

    def remember(self, memory: Ragged) -> Keys:
        """Keys and values of a whole memory, prepared once for all steps."""
        layout = memory.layout
        both = self.keys_and_values(memory.values)
        k, v = (memory.like(x).to_padded().transpose(1, 2) for x in both)  # [B, H, M, key], [B, H, M, value]
        same = min(layout.sizes) == layout.longest
        allowed = None if same else layout.real()[:, None, None]
        # contiguous by head: every step reads them again
        return Keys(self.score.prepare(k).contiguous(), v.contiguous(), allowed, layout.sizes)

    def look(self, x: Tensor, memory: Keys, rows: Sequence[int] | None = None) -> Tensor:
        """One step against a memory; a sentence's beams are queries side by side.  # [R, width] -> [R, output]"""
        sentences = memory.keys.shape[0]
        q = self.queries(x)  # [R, H, query]
        q = q.view(sentences, -1, self.heads, q.shape[-1]).transpose(1, 2)  # [B, H, beams, query]
        out = attend_keys(q, memory, score=self.score, dropout=self._dropout, sink=self.sink, rows=rows)
        return self.join(out.transpose(1, 2).flatten(0, 1))  # [R, output]

    def cache(self, rows: int, limit: int, like: Tensor) -> Cache:
        s = self.spec
        return Cache(rows, s.heads, limit, self.score.prepared_size, s.value_size, like)

    def step(self, x: Tensor, cache: Cache, bias: Tensor | None = None) -> Tensor:
        """Causal self-attention for one new token a row.  # [R, width] -> [R, output]"""
        q, k, v = self.queries(x), *self.keys_and_values(x)  # [R, H, size]
        memory = cache.append(self.score.prepare(k.unsqueeze(-2)).squeeze(-2), v)
        out = attend_keys(q.unsqueeze(2), memory, score=self.score, bias=bias, dropout=self._dropout, sink=self.sink)
        return self.join(out.squeeze(2))

    @property
    def _dropout(self) -> float:
        return self.spec.dropout if self.training else 0.0

    def _split(self, x: Tensor, projection: nn.Linear | None) -> Tensor:
        projected = x if projection is None else projection(x)
        return projected.view(x.shape[0], self.heads, -1)  # [T, H, size]
