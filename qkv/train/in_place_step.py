"""Training steps of workloads that change the weights by themselves, such as word2vec."""

from __future__ import annotations

from typing import Any

import torch

from qkv.errors import InputError
from qkv.objectives.loss import to_device
from qkv.recipe.schema import Recipe
from qkv.train.distributed.processes import DistributedInfo
from qkv.train.run_log import LossMeter
from qkv.train.step import StepBatch, TrainStep
from qkv.train.workload import Workload

# keys of `train` that gradients or an optimizer are needed for, with the only value that they may have
_FIXED_KEYS = {
    "optimizer": "sgd",
    "gradient_accumulation_steps": 1,
    "max_grad_norm": None,
    "weight_decay": 0.0,
    "compile": False,
    "activation_checkpointing": False,
    "strategy": "ddp",
}


class InPlaceStep(TrainStep):
    """A step by the `update` of a workload with `updates_in_place`: gradient descent without an optimizer's state."""

    workload: Any  # with `update`

    def __init__(self, recipe: Recipe, workload: Workload, dist_info: DistributedInfo) -> None:
        for key, value in _FIXED_KEYS.items():
            if getattr(recipe.train, key) != value:
                expected = "leave it out" if value is None else f"set it to {str(value).lower()}"
                raise InputError(f"train.{key}: this objective changes the weights itself; {expected}")
        if not dist_info.is_single:
            raise InputError("this objective trains in one process; run it without torchrun")
        super().__init__(recipe, workload, dist_info)
        self.backward.enabled = False

    def __call__(self, step: int, step_batch: StepBatch, learning_rate: float, meter: LossMeter) -> None:
        """Update the weights; the loss is that of the part of the batch that the workload reports."""
        inputs = to_device(step_batch.microbatches[0].inputs, self.device)
        loss = self.workload.update(self.model, inputs, learning_rate)
        if self.ema is not None:
            self.ema.update(self.model, step)
        meter.add(torch.stack([loss.total.detach().float()]), [loss.num_targets], step_batch.num_tokens)


def make_train_step(recipe: Recipe, workload: Workload, dist_info: DistributedInfo) -> TrainStep:
    """Return the training step of a workload."""
    step_class = InPlaceStep if getattr(workload, "updates_in_place", False) else TrainStep
    return step_class(recipe, workload, dist_info)
