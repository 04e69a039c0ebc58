"""Weights that trail behind the trained ones: their exponential moving average (Polyak & Juditsky 1992).

It is smoother than what the last batches made of the weights, and often scores better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qkv.checkpoints.model_folder import unique_state_dict
from qkv.errors import InputError


class EMA:
    """average = decay x average + (1 - decay) x weights, a step each; in float32, where the model lies."""

    def __init__(self, model: nn.Module, decay: float):
        if not 0 <= decay < 1:
            raise InputError(f"the decay of averaged weights lies between 0 and 1, such as 0.999; it cannot be {decay}")
        self.decay = decay
        self._averages = {name: tensor.detach().float().clone() for name, tensor in unique_state_dict(model).items()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int | None = None) -> None:
        """Takes in the weights of one more step; nothing waits for the device.

        Given its number, the first steps forget faster: random weights would stay in the mean for long.
        """
        decay = self.decay if step is None else min(self.decay, (1 + step) / (10 + step))
        weights = [tensor.float() for tensor in self._weights_in_order(model)]
        torch._foreach_lerp_(list(self._averages.values()), weights, 1 - decay)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages themselves, named as `qkv.checkpoints.model_folder.unique_state_dict` names them: tied weights once."""
        return dict(self._averages)

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from what `state_dict` gave."""
        if tensors.keys() != self._averages.keys():
            other = min(tensors.keys() ^ self._averages.keys())
            raise InputError(f"averaged weights: '{other}' is not on both sides; do they belong to another model?")
        for name, average in self._averages.items():
            if tensors[name].shape != average.shape:
                shapes = f"{list(tensors[name].shape)} there and {list(average.shape)} here"
                raise InputError(f"averaged weights: '{name}' is {shapes}; do they belong to another model?")
        for name, average in self._averages.items():
            average.copy_(tensors[name])

    @contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[None]:
        """The model has the averaged weights inside of the block, and its own to the bit behind it."""
        original = [weight.clone() for weight in self._weights_in_order(model)]
        try:
            _copy_tensors(self._weights_in_order(model), list(self._averages.values()))
            yield
        finally:
            # asked for anew: that makes a sharded model give up what it had gathered of the other weights
            _copy_tensors(self._weights_in_order(model), original)

    def _weights_in_order(self, model: nn.Module) -> list[Tensor]:
        weights = unique_state_dict(model)
        return [weights[name].detach() for name in self._averages]


@torch.no_grad()
def _copy_tensors(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):  # one by one: sharded tensors know no other way
        target.copy_(source)
