"""Losses as sums over targets, and moving a batch to a device."""

from __future__ import annotations

from collections.abc import Sequence
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


def combine_losses(microbatches: Sequence[tuple[LossSum, ...]], weights: Sequence[float] | None = None) -> Tensor:
    """Return the loss of a batch: the mean of each loss over the targets of all micro-batches, added up.

    Args:
        microbatches: the losses of each micro-batch.
        weights: factor of each loss, such as the weight of GPT's auxiliary language-model loss; None: 1 for all.
    """
    total = torch.zeros((), device=microbatches[0][0].total.device)
    for index, terms in enumerate(zip(*microbatches, strict=True)):
        weight = 1.0 if weights is None else weights[index]
        num_targets = max(sum(term.num_targets for term in terms), 1)
        total = total + torch.stack([term.total for term in terms]).sum() * weight / num_targets
    return total


def to_device(batch: AnyBatch, device: torch.device | str) -> AnyBatch:
    """Copy a batch, a named tuple of tensors and packed tensors, to a device without waiting for the copy."""
    return type(batch)(*(_move_field(field, torch.device(device)) for field in batch))


def _move_field(field: Any, device: torch.device) -> Any:
    if isinstance(field, Ragged):
        return field.to(device)
    return to_device_async(field, device) if isinstance(field, Tensor) else field
