"""What all objectives share: a loss as a sum with the number of its targets, and the way of a batch to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from qkv.nn import Ragged
from qkv.nn.ragged import to_device_async

AnyBatch = TypeVar("AnyBatch", bound=tuple[Any, ...])


class LossSum(NamedTuple):
    """One kind of loss. It is a sum, so that a batch may be cut into parts; whoever steps divides once."""

    total: Tensor
    num_targets: int


def combine_losses(microbatches: Sequence[tuple[LossSum, ...]], weights: Sequence[float] | None = None) -> Tensor:
    """The loss of a batch from its parts': for each kind the sum over its number of targets, and the kinds added up.

    So BERT's two mean losses are added up in pretraining and, with weights, a task's loss and the language model's in
    GPT's fine-tuning, however a batch was cut.
    """
    total = torch.zeros((), device=microbatches[0][0].total.device)
    for index, terms in enumerate(zip(*microbatches, strict=True)):
        weight = 1.0 if weights is None else weights[index]
        total = total + torch.stack([term.total for term in terms]).sum() * weight / max(sum(t.num_targets for t in terms), 1)
    return total


def to_device(batch: AnyBatch, device: torch.device | str) -> AnyBatch:
    """The same batch, a named tuple of tensors and packed tensors, on a device; it does not wait for the copy."""
    return type(batch)(*(_move_field(field, torch.device(device)) for field in batch))


def _move_field(field: Any, device: torch.device) -> Any:
    if isinstance(field, Ragged):
        return field.to(device)
    return to_device_async(field, device) if isinstance(field, Tensor) else field
