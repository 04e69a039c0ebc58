"""More than one process: who is there, and one model trained by all of them, copied (DDP) or in shards (FSDP2).

Each process takes its share of a global batch. Copies (Li et al. 2020, https://arxiv.org/abs/2006.15704) add up their
gradients; shards (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054; Zhao et al. 2023,
https://arxiv.org/abs/2304.11277) hold a piece of every parameter, gradient and moment, and gather a block's weights
for as long as it works. Both are torch's. Processes are started by torchrun; alone, nothing here touches
torch.distributed.
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

from qkv.checkpoints.model_folder import AnyModel
from qkv.errors import InputError
from qkv.nn import Ragged
from qkv.nn.block import Block

Strategy = Literal["ddp", "fsdp"]
Result = TypeVar("Result")

_RANK_VARS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # torchrun says them to each process that it starts
_RENDEZVOUS_VARS = ("MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = timedelta(hours=1)  # while rank 0 decodes or writes; one that died is noticed by torchrun at once


@dataclass(frozen=True)
class DistributedInfo:
    """Which of how many processes this one is, and the device it works on."""

    rank: int
    world_size: int
    local_rank: int  # among those of this machine
    device: torch.device

    @property
    def is_single(self) -> bool:
        return self.world_size == 1

    @property
    def is_main(self) -> bool:
        """The one that writes files and speaks."""
        return self.rank == 0


def init_distributed(device: str | None = None) -> DistributedInfo:
    """Meets the other processes that torchrun started; without torchrun this is the only one."""
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
        raise InputError(f"the environment lacks {missing_vars[0]}, where {world_size} processes meet; start them with torchrun")
    local_device = _local_device(requested, local_rank)
    if local_device.type == "cuda":
        torch.cuda.set_device(local_device)
    if not dist.is_initialized():
        backend, device_id = ("nccl", local_device) if local_device.type == "cuda" else ("gloo", None)
        dist.init_process_group(backend, timeout=_TIMEOUT, device_id=device_id)
    return DistributedInfo(rank, world_size, local_rank, local_device)


def _read_rank_vars() -> tuple[int, int, int] | None:
    """What torchrun said, or None where nobody said anything."""
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
        raise InputError(f"{', '.join(_RANK_VARS)} in the environment must be whole numbers; start with torchrun") from None
    if not 0 <= rank < world_size or local_rank < 0:
        raise InputError(f"the environment says rank {rank} of {world_size}; start with torchrun")
    return rank, world_size, local_rank


def _local_device(requested: torch.device, local_rank: int) -> torch.device:
    """A GPU of its own for each process of this machine."""
    if requested.type != "cuda":
        return requested
    if requested.index is not None:
        raise InputError(f"device {requested}: torchrun's processes take a GPU each; say 'cuda'")
    num_gpus = torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise InputError(f"process {local_rank} of this machine has no GPU, there are {num_gpus}; lower --nproc-per-node")
    return torch.device("cuda", local_rank)


def destroy_process_group(dist_info: DistributedInfo) -> None:
    """Says goodbye to the others, where there are any."""
    if not dist_info.is_single and dist.is_initialized():
        dist.destroy_process_group()


# ---- one model ------------------------------------------------------------------------------------------------------


def wrap_model(loss_module: nn.Module, model: nn.Module, strategy: Strategy, use_bf16: bool, dist_info: DistributedInfo) -> nn.Module:
    """What the loop calls instead of the loss module; it gives the same losses, and gradients that are means over ranks.

    All ranks hold the same weights before. `fsdp` replaces the model's parameters by shards on the ranks' devices:
    the model may lie on the CPU until then, and the optimiser is made after. With `use_bf16`, blocks are gathered in
    bfloat16; the loop's autocast stays on, so that all else computes as in one process.
    """
    if dist_info.is_single:
        return loss_module
    if strategy == "ddp":
        ddp_class = nn.parallel.DistributedDataParallel
        # buffers are constants: nothing about them has to be said to others (torch renamed this in 2.13)
        ddp_parameters = inspect.signature(ddp_class).parameters
        sync_buffers_arg = "forward_sync_buffers" if "forward_sync_buffers" in ddp_parameters else "broadcast_buffers"
        return ddp_class(loss_module, gradient_as_bucket_view=True, **{sync_buffers_arg: False})
    _shard(model, use_bf16, dist_info)
    return loss_module


def _shard(model: nn.Module, use_bf16: bool, dist_info: DistributedInfo) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    if torch.__version__ < "2.13":
        _register_pytree()
    mesh = init_device_mesh(dist_info.device.type, (dist_info.world_size,))
    # inputs are not cast and the root, with its embeddings, stays in float32: the residual stream is what it is in
    # one process
    mp_policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if use_bf16 else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in [m for m in model.modules() if isinstance(m, Block)]:
        fully_shard(block, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=True)
    # what blocks leave is the root's: a matrix with two names has to be in one group, and whoever reads the head's
    # weights after the model has been called finds them gathered
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    if hasattr(model, "forward_with_aux_head"):
        register_fsdp_forward_method(model, "forward_with_aux_head")


def _register_pytree() -> None:
    """Lets torch find the tensor in what a block gives: before 2.13 FSDP looks into no dataclass, and gathers no
    weights for a backward pass whose beginning it does not see."""
    from torch.utils import _pytree

    if Ragged not in _pytree.SUPPORTED_NODES:
        _pytree.register_pytree_node(
            Ragged, lambda ragged: ([ragged.values], ragged.layout), lambda values, layout: Ragged(next(iter(values)), layout)
        )


@contextmanager
def maybe_no_sync(loss_module: nn.Module, is_last: bool) -> Iterator[None]:
    """Around a part's forward and backward: copies exchange gradients at a step's last part alone.

    Shards exchange them at each part: otherwise every rank would keep the whole gradient, which is what sharding is
    there to avoid.
    """
    if is_last or not isinstance(loss_module, nn.parallel.DistributedDataParallel):
        yield
        return
    with loss_module.no_sync():
        yield


@contextmanager
def unsharded_copy(model: AnyModel) -> Iterator[AnyModel]:
    """The model to score and decode with: of shards a copy in one piece, on every rank; every rank has to come in.

    Only the copy is asked. Shards are gathered by all ranks together, at calls of the model and of its blocks alone:
    a step of decoding would find none, and a rank that asked once more than the others would keep them waiting.
    """
    if not dist.is_available() or not dist.is_initialized():
        yield model
        return
    from qkv.train.distributed.sharded_checkpoint import unshard

    yield unshard(model)


# ---- what ranks tell one another ------------------------------------------------------------------------------------


def all_reduce_sum(tensor: Tensor, dist_info: DistributedInfo) -> Tensor:
    """The sum over ranks, on the device; nobody waits for it on the host."""
    if dist_info.device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory().to(dist_info.device, non_blocking=True)
    if not dist_info.is_single:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
    return tensor


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scales gradients down to a norm of at most `max_norm`, over all shards; gives the norm that they had."""
    parameters = list(parameters)
    gradients = [_gradient_values(p) for p in parameters if p.grad is not None]
    if all(type(g) is Tensor and g.device.type == "cpu" and g.is_contiguous() for g in gradients):
        return _clip_grad_norm_cpu(gradients, max_norm)
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    full = getattr(norm, "full_tensor", None)  # of shards, each rank has a piece of the sum
    return norm if full is None else full()


def _gradient_values(parameter: Tensor) -> Tensor:
    """A gradient that lies in memory; of one of some rows those, once each."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout != torch.sparse_coo:
        return gradient
    parameter.grad = gradient.coalesce()
    return parameter.grad.values()  # no copy


def _clip_grad_norm_cpu(gradients: list[Tensor], max_norm: float) -> Tensor:
    """The same where numbers may be looked at: products of BLAS for torch's sums of squares, which go at a quarter of
    the memory's pace, and no pass over gradients that are short enough."""
    flat = [g.view(-1) for g in gradients]
    norm = math.sqrt(sum(float(torch.dot(g, g)) for g in flat))
    if not norm <= max_norm:  # also where it is no number: the weights then are none, which is found before they are saved
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))
    return torch.tensor(norm)


def on_main_rank(dist_info: DistributedInfo, action: Callable[[], Result]) -> Result:
    """Rank 0 does it while the others wait; all get its answer, and what stops it stops all with one message."""
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
