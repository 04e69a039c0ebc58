"""The objectives of one recipe: each training step uses one of them, drawn by weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from qkv import spec
from qkv.errors import InputError
from qkv.objectives.base import Objective, TextContext
from qkv.objectives.registry import OBJECTIVES
from qkv.recipe.objectives import ObjectiveConfig


class ObjectiveMixture:
    """One or several objectives that train the same model on the same chunks of text."""

    def __init__(self, configs: Mapping[str, ObjectiveConfig], seed: int) -> None:
        """Create the objectives.

        Args:
            configs: settings by the objective's name, as in a recipe.
            seed: decides together with the step which objective is drawn.
        """
        if not configs:
            raise InputError(f"objective: names no objective; known: {', '.join(OBJECTIVES.names())}")
        self.objectives: dict[str, Objective[Any]] = {
            name: OBJECTIVES.get(name)(config) for name, config in configs.items()
        }
        self._weights = {name: config.weight for name, config in configs.items()}
        self._seed = seed
        self._first = next(iter(self.objectives.values()))
        _check_mixable(self.objectives)

    @property
    def loss_names(self) -> tuple[str, ...]:
        return self._first.loss_names

    @property
    def sentence_pairs(self) -> bool:
        return self._first.sentence_pairs

    def at_step(self, step: int) -> Objective[Any]:
        """Return the objective of a training step or of a validation batch."""
        if len(self.objectives) == 1:
            return self._first
        return self.objectives[sample_objective(self._weights, seed=self._seed, step=step)]

    def of_inputs(self, inputs: Any) -> Objective[Any]:
        """Return the objective that prepared some inputs."""
        if len(self.objectives) == 1:
            return self._first
        return next(objective for objective in self.objectives.values() if type(inputs) is objective.inputs_class)

    def check_model(self, model: spec.Model) -> None:
        """Raise an InputError if an objective cannot train a model."""
        for objective in self.objectives.values():
            objective.check_model(model)

    def max_chunk_tokens(self, max_length: int, context: TextContext) -> int:
        """Return the largest number of text tokens in a chunk that suits every objective."""
        return min(objective.max_chunk_tokens(max_length, context) for objective in self.objectives.values())


def _check_mixable(objectives: Mapping[str, Objective[Any]]) -> None:
    """Refuse objectives that need different training loops or whose inputs have the same class."""
    if len(objectives) == 1:
        return
    names = " and ".join(objectives)
    if len({(objective.loss_names, objective.sentence_pairs) for objective in objectives.values()}) > 1:
        raise InputError(f"objective: {names} cannot be mixed: their losses or their examples differ; choose one")
    if len({objective.inputs_class for objective in objectives.values()}) < len(objectives):
        raise InputError(f"objective: {names} cannot be mixed: two of them have the same inputs_class; choose one")


def sample_objective(weights: Mapping[str, float], *, seed: int, step: int) -> str:
    """Draw one of several objectives by weight, as a function of seed and step alone."""
    if not weights or min(weights.values()) < 0 or not sum(weights.values()) > 0:
        raise InputError("objective: give every objective a weight of 0 or more, and at least one a weight above 0")
    # sorted, so that the order of the keys in a recipe does not matter
    names = sorted(name for name, weight in weights.items() if weight)
    cumulative = np.cumsum([weights[name] for name in names])
    # "mix" separates this random stream from those of the data; the 0 keeps steps and seeds that end in zeros apart
    random_bits = np.random.PCG64(np.random.SeedSequence([seed, step, 0, int.from_bytes(b"mix", "big")])).random_raw()
    threshold = (random_bits >> 11) * 2.0**-53 * cumulative[-1]
    return names[int(np.searchsorted(cumulative[:-1], threshold, side="right"))]
