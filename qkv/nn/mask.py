"""Who may look at whom, as a value; it becomes a tensor last, and only where a kernel needs one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bidirectional:
    """Every query may look at every key of its sequence."""

    def as_tensor(self, num_queries: int, num_keys: int, device: torch.device | str = "cpu") -> Tensor:
        return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)


@dataclass(frozen=True)
class Causal:
    """A query may look at keys at or before its own place: allowed where i >= j.

    The notes (Transformers and Pretraining, 1.3) print the inequality the other way round.
    """

    def as_tensor(self, num_queries: int, num_keys: int, device: torch.device | str = "cpu") -> Tensor:
        return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril()


Mask = Bidirectional | Causal
