"""One optimizer step: gradients of a batch's micro-batches, clipping, the update, the EMA."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qkv.data.batching import DataPosition
from qkv.errors import InputError
from qkv.nn import Ragged
from qkv.nn.ragged import to_device_async
from qkv.nn.stack import enable_activation_checkpointing
from qkv.objectives.loss import to_device
from qkv.recipe.schema import Recipe, TrainConfig
from qkv.train.distributed.processes import (
    DistributedInfo,
    all_reduce_sum,
    clip_grad_norm,
    maybe_no_sync,
    wrap_model,
)
from qkv.train.ema import EMA
from qkv.train.interruption import StopRequest, StopVotes
from qkv.train.optimizer import build_optimizer
from qkv.train.perf.cuda_graphs import CudaGraphRunner
from qkv.train.perf.memory import check_training_memory
from qkv.train.perf.mfu import compile_blocks, tune_malloc
from qkv.train.perf.static_batch import StaticShapePadder
from qkv.train.run_log import LossMeter
from qkv.train.workload import AnyBatch, LossModule, Workload


class StepBatch(NamedTuple):
    """The micro-batches of a global batch that this process trains on."""

    next_position: DataPosition  # position of the data after this batch
    microbatches: list[tuple[int, Any]]  # model inputs, each with its index in the global batch
    is_real: list[bool]  # False: a copy that gives all processes the same number of micro-batches; its loss counts 0
    num_tokens: int  # of the global batch

    @property
    def num_tokens_read(self) -> int:
        """Tokens that the model reads here, special tokens and both sides of a pair included."""
        fields = [field for _, inputs in self.microbatches for field in inputs]
        return sum(field.layout.num_tokens for field in fields if isinstance(field, Ragged))


class TrainStep:
    """A model with its optimizer. Calling it trains on one batch."""

    def __init__(self, recipe: Recipe, workload: Workload, dist_info: DistributedInfo) -> None:
        train_config = recipe.train
        self.recipe, self.workload, self.dist_info = recipe, workload, dist_info
        self.device = dist_info.device
        self.stop_request, self._stop_votes = StopRequest(), StopVotes(dist_info.device)
        self.use_bf16 = _configure_torch(train_config, self.device)
        torch.manual_seed(recipe.seed)
        initial_model = workload.model()
        check_training_memory(initial_model, train_config, self.device, dist_info.world_size)
        self.model = initial_model.to(self.device)
        if train_config.activation_checkpointing:
            enable_activation_checkpointing(self.model)
        if train_config.compile:
            compile_blocks(self.model, self.use_bf16)
        loss_module = LossModule(self.model, workload)
        self.loss_module = wrap_model(loss_module, self.model, train_config.strategy, self.use_bf16, dist_info)
        self.optimizer = build_optimizer(
            self.model,
            train_config,
            recipe.layerwise_lr_decay,
            head_lr_factor=recipe.head_lr_factor,
            lazy_embeddings=self._can_use_lazy_embeddings(),
        )
        self.ema = self._make_ema()
        # 1 / number of targets in the current batch, per loss
        self._loss_scale = torch.ones(len(workload.loss_names), device=self.device)
        self.backward = CudaGraphRunner(
            self._backward, self.model.parameters(), self._make_padder(), capture_all=train_config.compile
        )
        self.backward.enabled = train_config.cuda_graphs and dist_info.is_single and self.device.type == "cuda"

    def _can_use_lazy_embeddings(self) -> bool:
        """Sums over micro-batches, processes or losses, and EMA weights, need gradients of whole embeddings."""
        train_config, num_losses = self.recipe.train, len(self.workload.loss_names)
        is_one_backward_pass = train_config.gradient_accumulation_steps == num_losses == 1 and self.dist_info.is_single
        on_cpu = self.device.type == "cpu"
        return self.recipe.trains_few_embeddings and on_cpu and is_one_backward_pass and not train_config.ema_decay

    def _make_ema(self) -> EMA | None:
        if not self.recipe.train.ema_decay:
            return None
        if self.recipe.train.strategy == "fsdp":
            raise InputError("train.ema_decay: is not supported with strategy: fsdp; set it to 0, or strategy: ddp")
        return EMA(self.model, self.recipe.train.ema_decay)

    def _make_padder(self) -> StaticShapePadder | None:
        """Deterministic kernels and recomputation cannot be captured; a second loss has targets at added tokens."""
        train_config = self.recipe.train
        if train_config.deterministic or train_config.activation_checkpointing or len(self.workload.loss_names) > 1:
            return None
        return StaticShapePadder()

    def prepare(self, numbered_batch: tuple[int, tuple[DataPosition, AnyBatch]]) -> StepBatch:
        """Split and collate the batch of a step for this process; called from the threads that prepare batches.

        All processes get the same number of micro-batches, because they exchange gradients at each of them.
        """
        step, (next_position, batch) = numbered_batch
        world_size, rank = self.dist_info.world_size, self.dist_info.rank
        microbatches = batch.split(self.recipe.train.gradient_accumulation_steps * world_size)
        indices = range(rank, -(-len(microbatches) // world_size) * world_size, world_size)
        local_inputs = [
            (index, self.workload.collate(microbatches[index % len(microbatches)], step)) for index in indices
        ]
        return StepBatch(next_position, local_inputs, [index < len(microbatches) for index in indices], batch.tokens)

    def __call__(self, step: int, step_batch: StepBatch, learning_rate: float, meter: LossMeter) -> None:
        """Update the weights: each loss is its sum over all micro-batches divided by the number of all its targets."""
        counts = self._set_loss_scale(step_batch)
        self.optimizer.zero_grad(set_to_none=True)
        totals = torch.zeros(len(counts), device=self.device)
        numbered_microbatches = zip(step_batch.microbatches, step_batch.is_real, strict=True)
        for local_index, ((global_index, inputs), is_real) in enumerate(numbered_microbatches):
            if not is_real:
                self._loss_scale.zero_()
            # dropout depends on the step and the micro-batch alone, so that resumed and distributed runs agree
            torch.manual_seed(_derive_seed(self.recipe.seed, step, global_index))
            with maybe_no_sync(self.loss_module, is_last=local_index == len(step_batch.microbatches) - 1):
                losses = self.backward(to_device(self.backward.pad(inputs), self.device))
            totals += torch.stack(losses) * is_real
        if self.recipe.train.max_grad_norm is not None:
            clip_grad_norm(self.model.parameters(), self.recipe.train.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_scale", 1.0)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.model, step)
        meter.add(totals, counts, step_batch.num_tokens)

    @property
    def should_stop(self) -> bool:
        """Whether a signal asked the run to stop; all processes agree on it."""
        if self.dist_info.is_single:
            return self.stop_request.signum is not None
        return self._stop_votes.any_in_previous_step()

    def _set_loss_scale(self, step_batch: StepBatch) -> list[int]:
        """Set the scale of each loss, and return the number of targets of this process per loss."""
        num_losses = len(self.workload.loss_names)
        target_counts = [
            inputs.num_targets[:num_losses]
            for (_, inputs), is_real in zip(step_batch.microbatches, step_batch.is_real, strict=True)
            if is_real
        ]
        counts = np.sum([np.zeros(num_losses, np.int64), *target_counts], axis=0)
        world_size = self.dist_info.world_size  # gradients are averaged over processes
        # one exchange for the counts and the requests to stop
        sums = np.append(counts, int(self.stop_request.signum is not None))
        global_sums = all_reduce_sum(torch.from_numpy(sums), self.dist_info)  # [losses + 1]
        if not self.dist_info.is_single:
            self._stop_votes.add(global_sums[-1:])
        self._loss_scale.copy_(to_device_async(world_size / global_sums[:-1].clamp(min=1), self.device))
        return [int(count) for count in counts]

    def _backward(self, inputs: Any) -> tuple[Tensor, ...]:
        """Add the gradient of a micro-batch to the parameters and return its loss sums."""
        context: AbstractContextManager[Any] = nullcontext()
        if self.use_bf16:
            context = torch.autocast(self.device.type, torch.bfloat16)
        with context:
            losses = self.loss_module(inputs)
        totals = torch.stack([loss.total for loss in losses])  # [losses]
        torch.autograd.backward((totals * self._loss_scale).sum())
        return tuple(totals.detach())


def _configure_torch(train_config: TrainConfig, device: torch.device) -> bool:
    """Set torch's global precision and determinism; return whether to use bf16 autocast."""
    if train_config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if device.type == "cpu":
        tune_malloc()
    torch.set_float32_matmul_precision("high" if train_config.precision == "tf32" else "highest")
    bf16_supported = device.type == "cuda" and torch.cuda.is_bf16_supported()
    use_bf16 = train_config.precision == "bf16" or (train_config.precision == "auto" and bf16_supported)
    if use_bf16 and not bf16_supported:
        # on CPUs bf16 is slower than float32, and its kernels crash where the reported instructions are missing
        raise InputError("train.precision: bf16 needs a GPU that supports it; choose float32")
    return use_bf16


def _derive_seed(*entropy: int) -> int:
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))
