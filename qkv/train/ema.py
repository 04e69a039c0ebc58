"""Exponential moving average (EMA) of the weights (Polyak & Juditsky 1992), which often scores better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qkv.checkpoints.state import unique_state_dict
from qkv.errors import InputError


class EMA:
    """average = decay · average + (1 - decay) · weights at each step; in float32, on the model's device."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise InputError(f"the decay of an EMA is at least 0 and below 1, such as 0.999, not {decay}")
        self.decay = decay
        self._averages = {name: tensor.detach().float().clone() for name, tensor in unique_state_dict(model).items()}
        self._live_weights: tuple[nn.Module, list[Tensor]] | None = None  # of the model that is trained

    @torch.no_grad()
    def update(self, model: nn.Module, step: int | None = None) -> None:
        """Add the weights of a step to the average, without waiting for the device.

        With the number of the step, the first steps have a smaller decay, so that initial weights are soon forgotten.
        """
        decay = self.decay if step is None else min(self.decay, (1 + step) / (10 + step))
        if self._live_weights is None or self._live_weights[0] is not model:  # looking them up takes milliseconds
            live_weights = model.state_dict(keep_vars=True)
            self._live_weights = model, [live_weights[name] for name in self._averages]
        weights = [tensor.detach().float() for tensor in self._live_weights[1]]
        torch._foreach_lerp_(list(self._averages.values()), weights, 1 - decay)

    def observe(self, metric: float) -> None:
        """Take note of the metric of a validation, lower is better; an EMA does not depend on it."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by the names of `qkv.checkpoints.state.unique_state_dict`: tied weights once."""
        return dict(self._averages)

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned."""
        if tensors.keys() != self._averages.keys():
            other = min(tensors.keys() ^ self._averages.keys())
            raise InputError(f"EMA weights: '{other}' is not in both models; do they belong to another model?")
        for name, average in self._averages.items():
            if tensors[name].shape != average.shape:
                shapes = f"{list(tensors[name].shape)}, and the model's is {list(average.shape)}"
                raise InputError(f"EMA weights: '{name}' is {shapes}; do they belong to another model?")
        for name, average in self._averages.items():
            average.copy_(tensors[name])

    @contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[None]:
        """Give the model the averaged weights inside the block, and exactly its own weights after it."""
        original = [weight.clone() for weight in self._weights_in_order(model)]
        try:
            _copy_tensors(self._weights_in_order(model), list(self._averages.values()))
            yield
        finally:
            # looked up again, which makes a sharded model release the other weights that it had gathered
            _copy_tensors(self._weights_in_order(model), original)

    def _weights_in_order(self, model: nn.Module) -> list[Tensor]:
        weights = unique_state_dict(model)
        return [weights[name].detach() for name in self._averages]


@torch.no_grad()
def _copy_tensors(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):  # sharded tensors support no batched copy
        target.copy_(source)
