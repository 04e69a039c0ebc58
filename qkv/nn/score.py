"""How a query is compared with a key: dot, scaled dot, bilinear, additive, MLP.

Sources: "Attention weights" (Sequence to Sequence models: Attention Models) for h.s, h W s, v tanh(W [h; s]) and
MLP([h, s]); Luong et al. 2015; Bahdanau et al. 2015; Vaswani et al. 2017 for the scaled dot.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from qkv.errors import InputError
from qkv.spec import Attention


class Score(nn.Module):
    """One number for each query and key of a head. The key's share of the work is done once, in `prepare`."""

    def __init__(self, spec: Attention):
        super().__init__()
        self.kind = spec.score
        heads, query, key = spec.heads, spec.query_size, spec.key_size
        hidden = spec.score_width or key
        self.prepared_size = {"bilinear": query, "additive": hidden, "mlp": hidden}.get(self.kind, key)
        if self.is_dot and self.kind != "bilinear" and query != key:
            raise InputError(f"a {self.kind} score needs queries ({query}) and keys ({key}) of one size")
        self.scale = spec.scale / math.sqrt(key) if self.kind == "scaled_dot" else spec.scale
        if spec.scale != 1.0 and not self.is_dot:
            raise InputError(f"attention.scale goes with a dot product, not with a {self.kind} score")
        if self.kind == "bilinear":
            self.matrix = nn.Parameter(torch.empty(heads, key, query))
        if self.kind in ("additive", "mlp"):
            self.from_key = nn.Parameter(torch.empty(heads, key, hidden))
            self.from_query = nn.Parameter(torch.empty(heads, query, hidden))
            self.vector = nn.Parameter(torch.empty(heads, hidden, 1))
        if self.kind == "mlp":
            self.bias = nn.Parameter(torch.empty(heads, 1, 1, hidden))
            self.inner = nn.Parameter(torch.empty(heads, hidden, hidden))
            self.inner_bias = nn.Parameter(torch.empty(heads, 1, 1, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:  # Glorot & Bengio 2010 for each head
                bound = math.sqrt(6 / (parameter.shape[-1] + parameter.shape[-2]))
                nn.init.uniform_(parameter, -bound, bound)

    @property
    def is_dot(self) -> bool:
        """True where the score is a dot product of the query with the prepared key: a fused kernel may do it."""
        return self.kind in ("dot", "scaled_dot", "bilinear")

    def prepare(self, keys: Tensor) -> Tensor:
        """What depends on keys alone.  # [..., H, M, key] -> [..., H, M, P]"""
        if self.kind == "bilinear":
            return keys @ self.matrix
        if self.kind in ("additive", "mlp"):
            return keys @ self.from_key
        return keys

    def forward(self, queries: Tensor, prepared: Tensor) -> Tensor:
        """Raw scores e.  # [..., H, N, query], [..., H, M, P] -> [..., H, N, M]"""
        if self.is_dot:
            return (queries * self.scale) @ prepared.transpose(-1, -2)
        asked = (queries @ self.from_query).unsqueeze(-2)  # [..., H, N, 1, hidden]
        joined = asked + prepared.unsqueeze(-3)  # [..., H, N, M, hidden]: W [h; s] = W1 h + W2 s
        if self.kind == "additive":
            return self._with_vector(torch.tanh(joined))
        hidden = torch.relu(joined + self.bias)
        hidden = torch.relu(hidden @ self.inner.unsqueeze(-3) + self.inner_bias)
        return self._with_vector(hidden)

    def _with_vector(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.vector.unsqueeze(-3)).squeeze(-1)  # [..., H, N, M]
