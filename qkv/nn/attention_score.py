"""Score functions, which compare a query with a key: dot, scaled dot, bilinear, additive, MLP.

Sources: "Attention weights" (Sequence to Sequence models: Attention Models) for h.s, h W s, v tanh(W [h; s]) and
MLP([h, s]); Luong et al. 2015; Bahdanau et al. 2015; Vaswani et al. 2017 for the scaled dot product.

A score function is a subclass of `AttentionScore`, registered by name:

    @qkv.register.score_function("cosine")
    class Cosine(AttentionScore):
        def forward(self, queries, precomputed_keys):
            return F.normalize(queries, dim=-1) @ F.normalize(precomputed_keys, dim=-1).transpose(-1, -2)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError
from qkv.score_functions import SCORE_FUNCTIONS


class ScoreProduct(NamedTuple):
    """One matrix product of a score function, for `qkv.analysis.cost`."""

    per: Literal["query", "key", "pair"]  # computed once per query, per key, or per pair of both
    macs: int  # multiply-adds each time, in all heads
    saved_activations: int = 0  # floats each time that the backward pass needs


class AttentionScore(nn.Module, ABC):
    """Base of the score functions: one number per head, query and key.

    A subclass defines `forward`. Work that depends on the key alone belongs into `precompute_keys`, because decoding
    caches its result.
    """

    is_dot: bool = False  # the score is scale * query . precomputed key, so that fused kernels can compute it

    def __init__(self, s: spec.Attention):
        super().__init__()
        self.kind = s.score_fn
        self.scale = s.score_scale
        self.precomputed_dim = self.precomputed_key_dim(s)
        if s.score_scale != 1.0 and not self.is_dot:
            raise InputError(f"attention.score_scale: applies to dot products only, not to the {self.kind} score")

    @classmethod
    def precomputed_key_dim(cls, s: spec.Attention) -> int:
        """Return the size P of a precomputed key in one head."""
        return s.k_head_dim

    @classmethod
    def products(cls, s: spec.Attention) -> list[ScoreProduct]:
        """Return the matrix products of the score; the default is that of a dot product."""
        return [ScoreProduct("pair", s.heads * s.k_head_dim)]

    def reset_parameters(self) -> None:
        """Draw all weights of each head (Glorot & Bengio 2010) and set biases to zero."""
        _init_parameters(self.named_parameters(recurse=False))

    def precompute_keys(self, keys: Tensor) -> Tensor:
        """Apply the part of the score that depends on the keys alone.  # [..., H, M, key] -> [..., H, M, P]"""
        return keys

    @abstractmethod
    def forward(self, queries: Tensor, precomputed_keys: Tensor) -> Tensor:
        """Return the scores before the softmax.  # [..., H, N, query], [..., H, M, P] -> [..., H, N, M]"""


def _init_parameters(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    for name, parameter in named_parameters:
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            bound = math.sqrt(6 / (parameter.shape[-1] + parameter.shape[-2]))
            nn.init.uniform_(parameter, -bound, bound)


class DotScore(AttentionScore):
    """Dot product of query and key (Luong et al. 2015)."""

    is_dot = True

    def __init__(self, s: spec.Attention):
        super().__init__(s)
        if s.q_head_dim != self.precomputed_dim:
            raise InputError(
                f"a {self.kind} score needs queries ({s.q_head_dim}) and keys ({s.k_head_dim}) of one size"
            )

    def forward(self, queries: Tensor, precomputed_keys: Tensor) -> Tensor:
        return (queries * self.scale) @ precomputed_keys.transpose(-1, -2)


class ScaledDotScore(DotScore):
    """Dot product divided by the root of the key's size (Vaswani et al. 2017)."""

    def __init__(self, s: spec.Attention):
        super().__init__(s)
        self.scale = s.score_scale / math.sqrt(s.k_head_dim)


class BilinearScore(DotScore):
    """key W query: a dot product after a linear map of the key (Luong et al. 2015)."""

    def __init__(self, s: spec.Attention):
        super().__init__(s)
        self.matrix = nn.Parameter(torch.empty(s.heads, s.k_head_dim, s.q_head_dim))
        self.reset_parameters()

    @classmethod
    def precomputed_key_dim(cls, s: spec.Attention) -> int:
        return s.q_head_dim

    @classmethod
    def products(cls, s: spec.Attention) -> list[ScoreProduct]:
        query_dim = s.heads * s.q_head_dim
        return [ScoreProduct("key", query_dim * s.k_head_dim, query_dim), ScoreProduct("pair", query_dim)]

    def precompute_keys(self, keys: Tensor) -> Tensor:
        return keys @ self.matrix


class AdditiveScore(AttentionScore):
    """v tanh(W [key; query]), computed as v tanh(W1 key + W2 query) (Bahdanau et al. 2015)."""

    num_hidden_layers: int = 1

    def __init__(self, s: spec.Attention):
        super().__init__(s)
        hidden_dim = self.precomputed_dim
        self.from_key = nn.Parameter(torch.empty(s.heads, s.k_head_dim, hidden_dim))
        self.from_query = nn.Parameter(torch.empty(s.heads, s.q_head_dim, hidden_dim))
        self.vector = nn.Parameter(torch.empty(s.heads, hidden_dim, 1))
        self.reset_parameters()

    @classmethod
    def precomputed_key_dim(cls, s: spec.Attention) -> int:
        return s.score_hidden_dim or s.k_head_dim

    @classmethod
    def products(cls, s: spec.Attention) -> list[ScoreProduct]:
        hidden_dim = cls.precomputed_key_dim(s)
        hidden = s.heads * hidden_dim
        return [
            ScoreProduct("key", s.heads * s.k_head_dim * hidden_dim, hidden),
            ScoreProduct("query", s.heads * s.q_head_dim * hidden_dim, hidden),
            *[ScoreProduct("pair", hidden * hidden_dim)] * (cls.num_hidden_layers - 1),
            ScoreProduct("pair", hidden, hidden * cls.num_hidden_layers + s.heads),
        ]

    def precompute_keys(self, keys: Tensor) -> Tensor:
        return keys @ self.from_key

    def forward(self, queries: Tensor, precomputed_keys: Tensor) -> Tensor:
        query_hidden = (queries @ self.from_query).unsqueeze(-2)  # [..., H, N, 1, hidden]
        hidden = self._activate(query_hidden + precomputed_keys.unsqueeze(-3))  # [..., H, N, M, hidden]
        return (hidden @ self.vector.unsqueeze(-3)).squeeze(-1)  # [..., H, N, M]

    def _activate(self, combined: Tensor) -> Tensor:
        return torch.tanh(combined)


class MLPScore(AdditiveScore):
    """MLP([key, query]) with two hidden layers."""

    num_hidden_layers = 2

    def __init__(self, s: spec.Attention):
        super().__init__(s)
        hidden_dim = self.precomputed_dim
        self.bias = nn.Parameter(torch.empty(s.heads, 1, 1, hidden_dim))
        self.hidden_weight = nn.Parameter(torch.empty(s.heads, hidden_dim, hidden_dim))
        self.hidden_bias = nn.Parameter(torch.empty(s.heads, 1, 1, hidden_dim))
        # only the new ones: the others are drawn already
        names = ("bias", "hidden_weight", "hidden_bias")
        _init_parameters((name, parameter) for name, parameter in self.named_parameters() if name in names)

    def _activate(self, combined: Tensor) -> Tensor:
        hidden = torch.relu(combined + self.bias)
        return torch.relu(hidden @ self.hidden_weight.unsqueeze(-3) + self.hidden_bias)


def build_score(s: spec.Attention) -> AttentionScore:
    """Build the score function of an attention layer."""
    return SCORE_FUNCTIONS.get(s.score_fn)(s)
