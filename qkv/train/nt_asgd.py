"""NT-ASGD: SGD whose weights are averaged once validation stops improving (Merity et al. 2018, algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qkv.train.ema import EMA

_COUNT, _HISTORY = "num_averaged", "history"  # names of the state that is no weight


class NonmonotonicAverage(EMA):
    """Mean of the weights of all steps since the trigger; before it, the weights themselves.

    The trigger is a validation that is worse than the best one of those before the last `patience` ones.
    """

    def __init__(self, model: nn.Module, patience: int) -> None:
        super().__init__(model, 0.0)
        self.patience = patience
        self.is_averaging = False
        self._num_averaged = 0
        self._history: list[float] = []  # metrics of all validations, lower is better

    def observe(self, metric: float) -> None:
        """Add the metric of a validation, lower is better, and begin to average if it does not improve."""
        earlier = self._history[: -self.patience]
        self.is_averaging = self.is_averaging or (bool(earlier) and metric > min(earlier))
        self._history.append(metric)

    @torch.no_grad()
    def update(self, model: nn.Module, step: int | None = None) -> None:  # noqa: ARG002
        """Add the weights of a step to the mean."""
        if not self.is_averaging:
            return
        self._num_averaged += 1
        weights = [tensor.float() for tensor in self._weights_in_order(model)]
        torch._foreach_lerp_(list(self._averages.values()), weights, 1 / self._num_averaged)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the mean by the names of the weights, if there is one, and the progress towards the trigger."""
        progress = {
            _COUNT: torch.tensor([self.is_averaging, self._num_averaged]),
            _HISTORY: torch.tensor(self._history, dtype=torch.float64),
        }
        return (super().state_dict() if self._num_averaged else {}) | progress

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned; weights alone start from the beginning."""
        if _COUNT not in tensors or _HISTORY not in tensors:
            return
        averages = {name: tensor for name, tensor in tensors.items() if name not in (_COUNT, _HISTORY)}
        if averages:
            super().load_state_dict(averages)
        is_averaging, self._num_averaged = (int(number) for number in tensors[_COUNT].tolist())
        self.is_averaging, self._history = bool(is_averaging), tensors[_HISTORY].tolist()

    @contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[None]:
        """Give the model the averaged weights inside the block, if there are some."""
        if not self._num_averaged:
            yield
            return
        with super().applied_to(model):
            yield
