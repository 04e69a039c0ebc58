"""One optimizer step: gradients of a batch's micro-batches, clipping, the update, the EMA."""

from __future__ import annotations

import itertools
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
from qkv.train.nt_asgd import NonmonotonicAverage
from qkv.train.optimizer import build_optimizer
from qkv.train.perf.cuda_graphs import CudaGraphRunner
from qkv.train.perf.memory import check_training_memory
from qkv.train.perf.mfu import compile_blocks, tune_malloc
from qkv.train.perf.static_batch import StaticShapes
from qkv.train.run_log import LossMeter
from qkv.train.stream_memory import StreamMemory
from qkv.train.unfreezing import GradualUnfreezing
from qkv.train.workload import AnyBatch, LossModule, Workload

_OBSERVED_BATCHES = 256  # batches by which the static shapes are chosen
_MAX_COPIED_PARAMETERS = 2**26  # of a model of which each graph may have its own gradients


class Microbatch(NamedTuple):
    """Model inputs of a part of a global batch."""

    number: int  # its index in the global batch
    inputs: Any
    padded_inputs: Any  # the same, if possible padded to a static shape
    is_real: bool  # False: a copy that gives all processes the same number of micro-batches; its loss counts 0


class StepBatch(NamedTuple):
    """The micro-batches of a global batch that this process trains on."""

    next_position: DataPosition  # position of the data after this batch
    microbatches: list[Microbatch]
    num_tokens: int  # of the global batch
    lr_factor: float = 1.0  # factor on the learning rate of this step: the length of segments of random length

    @property
    def num_tokens_read(self) -> int:
        """Tokens that the model reads here, special tokens and both sides of a pair included, padding excluded."""
        fields = [field for microbatch in self.microbatches for field in microbatch.inputs]
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
        self.ema, self.memory = self._make_ema(), self._make_memory()
        self.unfreezing = self._make_unfreezing()
        # 1 / number of targets in the current batch, per loss
        self._loss_scale = torch.ones(len(workload.loss_names), device=self.device)
        self.backward = CudaGraphRunner(self._backward, self.model.parameters(), capture_all=train_config.compile)
        self.backward.enabled = train_config.cuda_graphs and dist_info.is_single and self.device.type == "cuda"
        # the steps of a recurrent network depend on the lengths; a graph computes the same gradients at every step
        self.backward.enabled &= self.memory is None and self.unfreezing is None
        # a graph that adds to gradients needs them where they were; one that makes them has memory of its own for them
        is_large = sum(p.numel() for p in self.model.parameters()) > _MAX_COPIED_PARAMETERS
        accumulates = train_config.gradient_accumulation_steps > 1
        self._keeps_gradients = self.backward.enabled and (accumulates or is_large)

    def _can_use_lazy_embeddings(self) -> bool:
        """Sums over micro-batches, processes or losses, and EMA weights, need gradients of whole embeddings."""
        train_config, num_losses = self.recipe.train, len(self.workload.loss_names)
        is_one_backward_pass = train_config.gradient_accumulation_steps == num_losses == 1 and self.dist_info.is_single
        on_cpu = self.device.type == "cpu"
        updates_all_weights = bool(train_config.ema_decay) or self.recipe.unfreeze_epochs is not None
        return self.recipe.trains_few_embeddings and on_cpu and is_one_backward_pass and not updates_all_weights

    def _make_ema(self) -> EMA | None:
        train_config = self.recipe.train
        is_nonmonotonic = train_config.optimizer == "nt_asgd"
        if not train_config.ema_decay and not is_nonmonotonic:
            return None
        key = "optimizer: nt_asgd" if is_nonmonotonic else "ema_decay"
        if train_config.strategy == "fsdp":
            raise InputError(f"train.{key}: is not supported with strategy: fsdp; change it, or set strategy: ddp")
        if is_nonmonotonic and train_config.ema_decay:
            raise InputError("train.ema_decay: nt_asgd averages the weights itself; set it to 0")
        if is_nonmonotonic:
            return NonmonotonicAverage(self.model, train_config.nonmonotone)
        return EMA(self.model, train_config.ema_decay)

    def _make_memory(self) -> StreamMemory | None:
        """Return the memory of the training streams, if the workload carries it."""
        if not getattr(self.workload, "carries_memory", False):
            return None
        if self.recipe.train.strategy == "fsdp":
            raise InputError("train.strategy: fsdp carries no memory; choose ddp, or set data.carry_memory to false")
        return StreamMemory(self.model, self.dist_info)

    def _make_unfreezing(self) -> GradualUnfreezing | None:
        epochs = self.recipe.unfreeze_epochs
        if epochs is None:
            return None
        if not self.dist_info.is_single:  # DDP decides once which gradients it exchanges
            raise InputError("finetune.unfreeze_epochs: is for one process; remove it, or train without torchrun")
        return GradualUnfreezing(self.model, round(epochs * self.workload.steps_per_epoch()))

    def choose_static_shapes(self) -> None:
        """Choose the static shapes of batches by the first ones of the data, whatever step a run is resumed at.

        Deterministic kernels and recomputation cannot be captured; a second loss has targets at added tokens.
        """
        train_config = self.recipe.train
        cannot_capture = train_config.deterministic or train_config.activation_checkpointing
        if not self.backward.enabled or cannot_capture or len(self.workload.loss_names) > 1:
            return
        num_batches = min(_OBSERVED_BATCHES, self.workload.steps_per_epoch())
        batches = itertools.islice(self.workload.batches_from(0, 0), num_batches)
        step_batches = map(self.prepare, enumerate(batches, 1))
        microbatches = itertools.chain.from_iterable(batch.microbatches for batch in step_batches)
        self.backward.static_shapes = StaticShapes.choose(microbatch.inputs for microbatch in microbatches)

    def prepare(self, numbered_batch: tuple[int, tuple[DataPosition, AnyBatch]]) -> StepBatch:
        """Split and collate the batch of a step for this process; called from the threads that prepare batches.

        All processes get the same number of micro-batches, because they exchange gradients at each of them.
        """
        step, (next_position, batch) = numbered_batch
        world_size, rank = self.dist_info.world_size, self.dist_info.rank
        parts = batch.split(self.recipe.train.gradient_accumulation_steps * world_size)
        microbatches = []
        for index in range(rank, -(-len(parts) // world_size) * world_size, world_size):
            inputs = self.workload.collate(parts[index % len(parts)], step)
            microbatches.append(Microbatch(index, inputs, self.backward.pad(inputs), is_real=index < len(parts)))
        lr_factor = getattr(getattr(batch, "segments", None), "lr_factor", 1.0)
        return StepBatch(next_position, microbatches, batch.tokens, lr_factor)

    def __call__(self, step: int, step_batch: StepBatch, learning_rate: float, meter: LossMeter) -> None:
        """Update the weights: each loss is its sum over all micro-batches divided by the number of all its targets."""
        counts = self._set_loss_scale(step_batch)
        if self.unfreezing is not None:
            self.unfreezing.apply(step)
        self.optimizer.zero_grad(set_to_none=not self._keeps_gradients)
        totals = torch.zeros(len(counts), device=self.device)
        for local_index, microbatch in enumerate(step_batch.microbatches):
            if not microbatch.is_real:
                self._loss_scale.zero_()
            # dropout depends on the step and the micro-batch alone, so that resumed and distributed runs agree
            torch.manual_seed(_derive_seed(self.recipe.seed, step, microbatch.number))
            with maybe_no_sync(self.loss_module, is_last=local_index == len(step_batch.microbatches) - 1):
                losses = self.backward(to_device(microbatch.padded_inputs, self.device))
            totals += torch.stack(losses) * microbatch.is_real
        if self.recipe.train.max_grad_norm is not None:
            clip_grad_norm(self.model.parameters(), self.recipe.train.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * step_batch.lr_factor * group.get("lr_scale", 1.0)
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
            microbatch.inputs.num_targets[:num_losses] for microbatch in step_batch.microbatches if microbatch.is_real
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
            if self.memory is None:
                losses = self.loss_module(inputs)
            else:
                losses, new_memory = self.loss_module(inputs, self.memory.read(inputs.segments))
        totals = torch.stack([loss.total for loss in losses])  # [losses]
        torch.autograd.backward((totals * self._loss_scale).sum())
        if self.memory is not None:
            self.memory.write(inputs.segments, new_memory)
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
