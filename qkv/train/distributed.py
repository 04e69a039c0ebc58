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

from qkv.errors import InputError
from qkv.nn import Ragged
from qkv.nn.block import Block
from qkv.weights.folder import AnyModel

Kind = Literal["ddp", "fsdp"]
Answer = TypeVar("Answer")

_WHO = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # torchrun says them to each process that it starts
_WHERE = ("MASTER_ADDR", "MASTER_PORT")
_PATIENCE = timedelta(hours=1)  # while rank 0 decodes or writes; one that died is noticed by torchrun at once


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this one is, and the device it works on."""

    rank: int
    size: int
    local_rank: int  # among those of this machine
    device: torch.device

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def first(self) -> bool:
        """The one that writes files and speaks."""
        return self.rank == 0


def join(device: str | None = None) -> Ranks:
    """Meets the other processes that torchrun started; without torchrun this is the only one."""
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    numbers = _numbers()
    if numbers is None:
        return Ranks(0, 1, 0, chosen)
    rank, size, local_rank = numbers
    if size == 1:
        return Ranks(0, 1, 0, chosen)
    if not dist.is_available():
        raise InputError("this torch was built without torch.distributed; run one process, or install another torch")
    missing = [name for name in _WHERE if name not in os.environ]
    if missing:
        raise InputError(f"the environment lacks {missing[0]}, where {size} processes meet; start them with torchrun")
    own = _own_device(chosen, local_rank)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    if not dist.is_initialized():
        backend, on = ("nccl", own) if own.type == "cuda" else ("gloo", None)
        dist.init_process_group(backend, timeout=_PATIENCE, device_id=on)
    return Ranks(rank, size, local_rank, own)


def _numbers() -> tuple[int, int, int] | None:
    """What torchrun said, or None where nobody said anything."""
    there = [name for name in _WHO if name in os.environ]
    if not there:
        return None
    if len(there) < len(_WHO):
        missing = next(name for name in _WHO if name not in there)
        raise InputError(
            f"the environment has {there[0]} and lacks {missing}; start with torchrun, or unset {there[0]}"
        )
    try:
        rank, size, local_rank = (int(os.environ[name]) for name in _WHO)
    except ValueError:
        raise InputError(f"{', '.join(_WHO)} in the environment must be whole numbers; start with torchrun") from None
    if not 0 <= rank < size or local_rank < 0:
        raise InputError(f"the environment says rank {rank} of {size}; start with torchrun")
    return rank, size, local_rank


def _own_device(chosen: torch.device, local_rank: int) -> torch.device:
    """A GPU of its own for each process of this machine."""
    if chosen.type != "cuda":
        return chosen
    if chosen.index is not None:
        raise InputError(f"device {chosen}: torchrun's processes take a GPU each; say 'cuda'")
    there = torch.cuda.device_count()
    if local_rank >= there:
        raise InputError(f"process {local_rank} of this machine has no GPU, there are {there}; lower --nproc-per-node")
    return torch.device("cuda", local_rank)


def leave(ranks: Ranks) -> None:
    """Says goodbye to the others, where there are any."""
    if not ranks.alone and dist.is_initialized():
        dist.destroy_process_group()


# ---- one model ------------------------------------------------------------------------------------------------------


def spread(judge: nn.Module, model: nn.Module, kind: Kind, half: bool, ranks: Ranks) -> nn.Module:
    """What the loop calls instead of the judge; it gives the same losses, and gradients that are means over ranks.

    All ranks hold the same weights before. `fsdp` replaces the model's parameters by shards on the ranks' devices:
    the model may lie on the CPU until then, and the optimiser is made after. With `half`, blocks are gathered in
    bfloat16; the loop's autocast stays on, so that all else computes as in one process.
    """
    if ranks.alone:
        return judge
    if kind == "ddp":
        copies = nn.parallel.DistributedDataParallel
        # buffers are constants: nothing about them has to be said to others (torch renamed this in 2.13)
        known = inspect.signature(copies).parameters
        quiet = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        return copies(judge, gradient_as_bucket_view=True, **{quiet: False})
    _shard(model, half, ranks)
    return judge


def _shard(model: nn.Module, half: bool, ranks: Ranks) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    # inputs are not cast and the root, with its embeddings, stays in float32: the residual stream is what it is in
    # one process
    thin = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in [m for m in model.modules() if isinstance(m, Block)]:
        fully_shard(block, mesh=mesh, mp_policy=thin, reshard_after_forward=True)
    # what blocks leave is the root's: a matrix with two names has to be in one group, and whoever reads the head's
    # weights after the model has been called finds them gathered
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    if hasattr(model, "both"):
        register_fsdp_forward_method(model, "both")


def _open_ragged() -> None:
    """Lets torch find the tensor in what a block gives: before 2.13 FSDP looks into no dataclass, and gathers no
    weights for a backward pass whose beginning it does not see."""
    from torch.utils import _pytree

    if Ragged not in _pytree.SUPPORTED_NODES:
        _pytree.register_pytree_node(
            Ragged, lambda given: ([given.values], given.layout), lambda found, layout: Ragged(*found, layout)
        )


@contextmanager
def meeting(judge: nn.Module, last: bool) -> Iterator[None]:
    """Around a part's forward and backward: copies exchange gradients at a step's last part alone.

    Shards exchange them at each part: otherwise every rank would keep the whole gradient, which is what sharding is
    there to avoid.
    """
    if last or not isinstance(judge, nn.parallel.DistributedDataParallel):
        yield
        return
    with judge.no_sync():
        yield


@contextmanager
def gathered(model: AnyModel) -> Iterator[AnyModel]:
    """The model to score and decode with: of shards a copy in one piece, on every rank; every rank has to come in.

    Only the copy is asked. Shards are gathered by all ranks together, at calls of the model and of its blocks alone:
    a step of decoding would find none, and a rank that asked once more than the others would keep them waiting.
    """
    if not dist.is_available() or not dist.is_initialized():
        yield model
        return
    from qkv.train.sharded import in_one_piece

    yield in_one_piece(model)


# ---- what ranks tell one another ------------------------------------------------------------------------------------


def total(counts: Tensor, ranks: Ranks) -> Tensor:
    """The sum over ranks, on the device; nobody waits for it on the host."""
    if ranks.device.type == "cuda" and counts.device.type == "cpu":
        counts = counts.pin_memory().to(ranks.device, non_blocking=True)
    if not ranks.alone:
        counts = counts.clone()
        dist.all_reduce(counts)
    return counts


def clip(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Scales gradients down to a norm of at most `limit`, over all shards; gives the norm that they had."""
    parameters = list(parameters)
    gradients = [_in_memory(p) for p in parameters if p.grad is not None]
    if all(type(g) is Tensor and g.device.type == "cpu" and g.is_contiguous() for g in gradients):
        return _clip_on_host(gradients, limit)
    norm = nn.utils.clip_grad_norm_(parameters, limit)
    full = getattr(norm, "full_tensor", None)  # of shards, each rank has a piece of the sum
    return norm if full is None else full()


def _in_memory(parameter: Tensor) -> Tensor:
    """A gradient that lies in memory; of one of some rows those, once each."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout != torch.sparse_coo:
        return gradient
    parameter.grad = gradient.coalesce()
    return parameter.grad.values()  # no copy


def _clip_on_host(gradients: list[Tensor], limit: float) -> Tensor:
    """The same where numbers may be looked at: products of BLAS for torch's sums of squares, which go at a quarter of
    the memory's pace, and no pass over gradients that are short enough."""
    flat = [g.view(-1) for g in gradients]
    norm = math.sqrt(sum(float(torch.dot(g, g)) for g in flat))
    if not norm <= limit:  # also where it is no number: the weights then are none, which is found before they are saved
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))
    return torch.tensor(norm)


def by_first(ranks: Ranks, action: Callable[[], Answer]) -> Answer:
    """Rank 0 does it while the others wait; all get its answer, and what stops it stops all with one message."""
    if ranks.alone:
        return action()
    said: list[Any] = [None, None]
    if ranks.first:
        try:
            said[0] = action()
        except InputError as error:
            said[1] = str(error)
    dist.broadcast_object_list(said, src=0)
    answer, problem = said
    if problem is not None:
        raise InputError(problem)
    return cast(Answer, answer)
