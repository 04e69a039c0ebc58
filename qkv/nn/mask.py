"""Attention masks as values; a tensor is built last, and only if a kernel needs one.

`offset` is the position of the first query among the keys of its sequence: with a memory of n tokens before the
queries, query i is at position n + i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bidirectional:
    """Every query attends to every key of its sequence."""

    def as_tensor(self, num_queries: int, num_keys: int, offset: int = 0, device: torch.device | str = "cpu") -> Tensor:  # noqa: ARG002
        """Return a tensor that is True everywhere.  # [N, M]"""
        return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)


@dataclass(frozen=True)
class Causal:
    """A query attends to keys at or before its own position: query i to key j if offset + i >= j.

    The notes (Transformers and Pretraining, 1.3) print the inequality the other way round.
    """

    def as_tensor(self, num_queries: int, num_keys: int, offset: int = 0, device: torch.device | str = "cpu") -> Tensor:
        """Return a tensor that is True where a query attends to a key.  # [N, M]"""
        return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(offset)


Mask = Bidirectional | Causal
