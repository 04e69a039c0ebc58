"""Gradual unfreezing: the head is trained first, then one layer after another (Howard & Ruder 2018, section 3.3)."""

from __future__ import annotations

from torch import nn

from qkv.nn.model import Model
from qkv.train.optimizer import layers_below_head


class GradualUnfreezing:
    """Which parameters are trained at a step, as a function of the step alone."""

    def __init__(self, model: Model, steps_per_stage: int) -> None:
        """Take note of the layer of each trainable parameter, and freeze all but the head.

        Args:
            model: the model, whose optimizer has been built.
            steps_per_stage: steps after which one more layer is trained.
        """
        self._steps_per_stage = max(1, steps_per_stage)
        self._layers: dict[int, list[nn.Parameter]] = {}  # by the number of layers up to the head
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._layers.setdefault(layers_below_head(model.spec, name), []).append(parameter)
        self._stage: int | None = None
        self.apply(1)

    def apply(self, step: int) -> None:
        """Make the parameters of a step (1, 2, …) trainable, and no others."""
        stage = (step - 1) // self._steps_per_stage
        if stage == self._stage:
            return
        self._stage = stage
        for depth, parameters in self._layers.items():
            for parameter in parameters:
                parameter.requires_grad_(depth <= stage)
