"""Distributed training: one model, replicated (DDP) or sharded (FSDP2) over the processes of torchrun.

Each process trains on its micro-batches of a global batch. DDP (Li et al. 2020, https://arxiv.org/abs/2006.15704)
replicates the model and averages gradients. FSDP (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054;
Zhao et al. 2023, https://arxiv.org/abs/2304.11277) shards parameters, gradients and moments, and gathers the weights of
a block while they are used. Both are torch's. A single process does not use torch.distributed.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qkv.checkpoints.state import AnyModel
from qkv.errors import InputError
from qkv.nn import Ragged
from qkv.nn.block import Block

Strategy = Literal["ddp", "fsdp"]
Result = TypeVar("Result")

_RANK_VARS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # torchrun sets them in each process
_RENDEZVOUS_VARS = ("MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = timedelta(hours=1)  # for waiting while rank 0 writes; torchrun notices a dead process at once


@dataclass(frozen=True)
class DistributedInfo:
    """The number of this process among all, and its device."""

    rank: int
    world_size: int
    local_rank: int  # number among the processes of this machine
    device: torch.device

    @property
    def is_single(self) -> bool:
        """Whether this is the only process."""
        return self.world_size == 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0


def init_distributed(device: str | None = None) -> DistributedInfo:
    """Join the process group of torchrun; without torchrun, this is the only process."""
    requested = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    rank_values = _read_rank_vars()
    if rank_values is None:
        return DistributedInfo(0, 1, 0, requested)
    rank, world_size, local_rank = rank_values
    if world_size == 1:
        return DistributedInfo(0, 1, 0, requested)
    if not dist.is_available():
        raise InputError("this torch was built without torch.distributed; run one process, or install another torch")
    missing_vars = [name for name in _RENDEZVOUS_VARS if name not in os.environ]
    if missing_vars:
        raise InputError(
            f"the environment lacks {missing_vars[0]} for {world_size} processes; start them with torchrun"
        )
    local_device = _local_device(requested, local_rank)
    if local_device.type == "cuda":
        torch.cuda.set_device(local_device)
    if not dist.is_initialized():
        backend, device_id = ("nccl", local_device) if local_device.type == "cuda" else ("gloo", None)
        dist.init_process_group(backend, timeout=_TIMEOUT, device_id=device_id)
    return DistributedInfo(rank, world_size, local_rank, local_device)


def _read_rank_vars() -> tuple[int, int, int] | None:
    """Return rank, world size and local rank as torchrun sets them; None without torchrun."""
    present = [name for name in _RANK_VARS if name in os.environ]
    if not present:
        return None
    if len(present) < len(_RANK_VARS):
        missing = next(name for name in _RANK_VARS if name not in present)
        raise InputError(
            f"the environment has {present[0]} and lacks {missing}; start with torchrun, or unset {present[0]}"
        )
    try:
        rank, world_size, local_rank = (int(os.environ[name]) for name in _RANK_VARS)
    except ValueError:
        raise InputError(f"{', '.join(_RANK_VARS)} in the environment must be integers; start with torchrun") from None
    if not 0 <= rank < world_size or local_rank < 0:
        raise InputError(f"the environment has rank {rank} of {world_size} processes; start with torchrun")
    return rank, world_size, local_rank


def _local_device(requested: torch.device, local_rank: int) -> torch.device:
    """Return a GPU for each process of this machine."""
    if requested.type != "cuda":
        return requested
    if requested.index is not None:
        raise InputError(f"device {requested}: each process of torchrun uses its own GPU; use 'cuda'")
    num_gpus = torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise InputError(
            f"process {local_rank} of this machine has no GPU, there are {num_gpus}; lower --nproc-per-node"
        )
    return torch.device("cuda", local_rank)


def destroy_process_group(dist_info: DistributedInfo) -> None:
    """Leave the process group, if there is one."""
    if not dist_info.is_single and dist.is_initialized():
        dist.destroy_process_group()


# ---- one model ------------------------------------------------------------------------------------------------------


def wrap_model(
    loss_module: nn.Module, model: nn.Module, strategy: Strategy, use_bf16: bool, dist_info: DistributedInfo
) -> nn.Module:
    """Return the module to call instead of the loss module; its gradients are means over all ranks.

    All ranks must have the same weights. With `fsdp`, the model's parameters are replaced by shards on the devices of
    the ranks, so the optimizer must be built afterwards. With `use_bf16`, weights of blocks are gathered in bfloat16;
    autocast stays on, so that everything else computes as in one process.
    """
    if dist_info.is_single:
        return loss_module
    if strategy == "ddp":
        ddp_class = nn.parallel.DistributedDataParallel
        # buffers are constants and need no synchronization (torch renamed this argument in 2.13)
        ddp_parameters = inspect.signature(ddp_class).parameters
        sync_buffers_arg = "forward_sync_buffers" if "forward_sync_buffers" in ddp_parameters else "broadcast_buffers"
        arguments: dict[str, Any] = {"gradient_as_bucket_view": True, sync_buffers_arg: False}
        return ddp_class(loss_module, **arguments)
    _shard(model, use_bf16, dist_info)
    return loss_module


def _shard(model: nn.Module, use_bf16: bool, dist_info: DistributedInfo) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    if torch.__version__ < "2.13":
        _register_pytree()
    mesh = init_device_mesh(dist_info.device.type, (dist_info.world_size,))
    # inputs are not cast, and the root with its embeddings stays in float32: the residual stream is as in one process
    mp_policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if use_bf16 else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in [m for m in model.modules() if isinstance(m, Block)]:
        fully_shard(block, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=True)
    # all other parameters form the root group: tied weights must be in one group, and code that reads the weights of
    # the head after calling the model needs them gathered
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    if hasattr(model, "forward_with_aux_head"):
        register_fsdp_forward_method(model, "forward_with_aux_head")


def _register_pytree() -> None:
    """Let FSDP find the tensor in a Ragged: before torch 2.13 it ignores dataclasses in the outputs of a block.

    Without it, weights are not gathered for the backward pass.
    """
    from torch.utils import _pytree

    if Ragged not in _pytree.SUPPORTED_NODES:
        _pytree.register_pytree_node(
            Ragged,
            lambda ragged: ([ragged.values], ragged.layout),
            lambda values, layout: Ragged(next(iter(values)), layout),
        )


@contextmanager
def maybe_no_sync(loss_module: nn.Module, is_last: bool) -> Iterator[None]:
    """Skip the exchange of DDP's gradients, except for the last micro-batch of a step.

    FSDP exchanges gradients at each micro-batch: otherwise every rank would hold the full gradient.
    """
    if is_last or not isinstance(loss_module, nn.parallel.DistributedDataParallel):
        yield
        return
    with loss_module.no_sync():
        yield


@contextmanager
def unsharded_copy(model: AnyModel) -> Iterator[AnyModel]:
    """Yield the model for evaluation: a sharded one as a full copy on every rank; all ranks must enter.

    A sharded model cannot generate: its weights are gathered only when all ranks call the model or a block, and a rank
    with more decoding steps than the others would wait forever.
    """
    if not dist.is_available() or not dist.is_initialized():
        yield model
        return
    from qkv.train.distributed.sharded_checkpoint import unshard

    yield unshard(model)


# ---- communication --------------------------------------------------------------------------------------------------


def all_reduce_sum(tensor: Tensor, dist_info: DistributedInfo) -> Tensor:
    """Return the sum over all ranks, on the device; the host does not wait for it."""
    if dist_info.device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory().to(dist_info.device, non_blocking=True)
    if not dist_info.is_single:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
    return tensor


def wait_for_all(dist_info: DistributedInfo) -> None:
    """Return when all ranks have come this far."""
    all_reduce_sum(torch.zeros(1), dist_info).item()


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients down to a global norm of at most `max_norm`, and return their norm before."""
    parameters = list(parameters)
    gradients = [_gradient_values(p) for p in parameters if p.grad is not None]
    if all(type(g) is Tensor and g.device.type == "cpu" and g.is_contiguous() for g in gradients):
        return _clip_grad_norm_cpu(gradients, max_norm)
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    full: Callable[[], Tensor] | None = getattr(norm, "full_tensor", None)  # a DTensor, if the model is sharded
    return norm if full is None else full()


def _gradient_values(parameter: Tensor) -> Tensor:
    """Return the values of a gradient in memory; of a sparse gradient, each row once."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout != torch.sparse_coo:
        return gradient
    parameter.grad = gradient.coalesce()
    return parameter.grad.values()  # no copy


def _clip_grad_norm_cpu(gradients: list[Tensor], max_norm: float) -> Tensor:
    """Clip on a CPU, where reading a number is cheap.

    BLAS computes sums of squares four times as fast as torch, and gradients within the norm are not written.
    """
    flat = [g.view(-1) for g in gradients]
    norm = math.sqrt(sum(float(torch.dot(g, g)) for g in flat))
    if not norm <= max_norm:  # also if it is NaN: the weights become NaN, which is noticed before they are saved
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))
    return torch.tensor(norm)


def on_main_rank(dist_info: DistributedInfo, action: Callable[[], Result]) -> Result:
    """Run an action on rank 0 and return its result on all ranks; an InputError is raised on all of them."""
    if dist_info.is_single:
        return action()
    outcome: list[Any] = [None, None]
    if dist_info.is_main:
        try:
            outcome[0] = action()
        except InputError as error:
            outcome[1] = str(error)
    dist.broadcast_object_list(outcome, src=0)
    result, error_message = outcome
    if error_message is not None:
        raise InputError(error_message)
    return cast(Result, result)
