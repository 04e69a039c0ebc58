"""Losses as sums over targets, and moving a batch to a device."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from qkv.nn import Ragged
from qkv.nn.ragged import to_device_async

AnyBatch = TypeVar("AnyBatch", bound=tuple[Any, ...])


class LossSum(NamedTuple):
    """A loss summed over its targets. The mean is taken once per step, so that micro-batches do not change it."""

    total: Tensor  # []
    num_targets: int


def to_device(batch: AnyBatch, device: torch.device | str) -> AnyBatch:
    """Copy a batch, a named tuple of tensors and packed tensors, to a device without waiting for the copy."""
    return type(batch)(*(_move_field(field, torch.device(device)) for field in batch))


def _move_field(field: Any, device: torch.device) -> Any:
    if isinstance(field, Ragged):
        return field.to(device)
    return to_device_async(field, device) if isinstance(field, Tensor) else field
