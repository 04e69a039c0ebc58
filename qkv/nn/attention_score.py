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


class AttentionScore(nn.Module):
    """One number for each query and key of a head. The key's share of the work is done once, in `precompute_keys`."""

    def __init__(self, spec: Attention):
        super().__init__()
        self.kind = spec.score_fn
        heads, query_dim, key_dim = spec.heads, spec.q_head_dim, spec.k_head_dim
        hidden_dim = spec.score_hidden_dim or key_dim
        self.precomputed_dim = {"bilinear": query_dim, "additive": hidden_dim, "mlp": hidden_dim}.get(self.kind, key_dim)
        if self.is_dot and self.kind != "bilinear" and query_dim != key_dim:
            raise InputError(f"a {self.kind} score needs queries ({query_dim}) and keys ({key_dim}) of one size")
        self.scale = spec.score_scale / math.sqrt(key_dim) if self.kind == "scaled_dot" else spec.score_scale
        if spec.score_scale != 1.0 and not self.is_dot:
            raise InputError(f"attention.score_scale goes with a dot product, not with a {self.kind} score")
        if self.kind == "bilinear":
            self.matrix = nn.Parameter(torch.empty(heads, key_dim, query_dim))
        if self.kind in ("additive", "mlp"):
            self.from_key = nn.Parameter(torch.empty(heads, key_dim, hidden_dim))
            self.from_query = nn.Parameter(torch.empty(heads, query_dim, hidden_dim))
            self.vector = nn.Parameter(torch.empty(heads, hidden_dim, 1))
        if self.kind == "mlp":
            self.bias = nn.Parameter(torch.empty(heads, 1, 1, hidden_dim))
            self.hidden_weight = nn.Parameter(torch.empty(heads, hidden_dim, hidden_dim))
            self.hidden_bias = nn.Parameter(torch.empty(heads, 1, 1, hidden_dim))
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

    def precompute_keys(self, keys: Tensor) -> Tensor:
        """What depends on keys alone.  # [..., H, M, key] -> [..., H, M, P]"""
        if self.kind == "bilinear":
            return keys @ self.matrix
        if self.kind in ("additive", "mlp"):
            return keys @ self.from_key
        return keys

    def forward(self, queries: Tensor, precomputed_keys: Tensor) -> Tensor:
        """Raw scores e.  # [..., H, N, query], [..., H, M, P] -> [..., H, N, M]"""
        if self.is_dot:
            return (queries * self.scale) @ precomputed_keys.transpose(-1, -2)
        query_hidden = (queries @ self.from_query).unsqueeze(-2)  # [..., H, N, 1, hidden]
        combined = query_hidden + precomputed_keys.unsqueeze(-3)  # [..., H, N, M, hidden]: W [h; s] = W1 h + W2 s
        if self.kind == "additive":
            return self._project_to_score(torch.tanh(combined))
        hidden = torch.relu(combined + self.bias)
        hidden = torch.relu(hidden @ self.hidden_weight.unsqueeze(-3) + self.hidden_bias)
        return self._project_to_score(hidden)

    def _project_to_score(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.vector.unsqueeze(-3)).squeeze(-1)  # [..., H, N, M]
