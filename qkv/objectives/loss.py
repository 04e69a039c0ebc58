"""Losses as sums over targets, and moving a batch to a device."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from qkv.nn import BatchLayout, Ragged
from qkv.nn.ragged import to_device_async

AnyBatch = TypeVar("AnyBatch", bound=tuple[Any, ...])

IGNORE_INDEX = -100  # label without a loss
LayoutChains = tuple[tuple[BatchLayout, ...], ...]


class ExtensibleInputs(Protocol):
    """Model inputs to which sequences without targets can be added, which gives varied batches one static shape."""

    @property
    def layout_chains(self) -> LayoutChains:
        """Layouts that grow with the number of sequences; empty if these inputs cannot be extended.

        The first layouts of all chains have the same number of sequences. The sequences of the second layout of a
        chain are the entries of the first one: the choices of a question, each of which has tokens.
        """
        ...

    def extend(self, chains: LayoutChains) -> Any:
        """Return the inputs with the layouts of `chains`, which begin with those of the inputs.

        The added tokens must change neither the sums of the losses nor their gradients.
        """
        ...


class LossSum(NamedTuple):
    """A loss summed over its targets. The mean is taken once per step, so that micro-batches do not change it."""

    total: Tensor  # []
    num_targets: int


def to_device(batch: AnyBatch, device: torch.device | str) -> AnyBatch:
    """Copy a batch, a named tuple of tensors and packed tensors, to a device without waiting for the copy."""
    return type(batch)(*(_move_field(field, torch.device(device)) for field in batch))


def _move_field(field: Any, device: torch.device) -> Any:
    if isinstance(field, Ragged | BatchLayout):
        return field.to(device)
    return to_device_async(field, device) if isinstance(field, Tensor) else field
