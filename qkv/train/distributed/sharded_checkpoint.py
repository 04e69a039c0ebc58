"""Checkpoints of a model in shards, by torch's distributed checkpoint: any number of processes takes up where another
number stopped.

`last-<step>/` holds the tensors, each rank's shards in a file of its own. `last.json` names that folder and says where
the run stands; it is written last and whole, so that a kill at any moment leaves the older checkpoint or the newer one.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from qkv.checkpoints.model_folder import AnyModel, load_state, unique_state_dict
from qkv.errors import InputError
from qkv.files import atomic_write_text
from qkv.nn.model import build_on_meta
from qkv.train.checkpoint import SHARDED_LAST_CHECKPOINT as LAST
from qkv.train.checkpoint import TrainState, delete_stale_averages
from qkv.train.distributed.processes import DistributedInfo, on_main_rank


def save_sharded(
    folder: Path, model: AnyModel, optimizer: torch.optim.Optimizer, train_state: TrainState, dist_info: DistributedInfo
) -> None:
    """Everything that the next start needs; every rank has to come in. The older one goes only after this."""
    previous, name = on_main_rank(dist_info, lambda: _new_checkpoint_folder(folder, train_state.step))
    path = folder / name
    try:
        with _suppress_single_process_warning():
            torch_checkpoint.save(_named_tensors(model, optimizer), checkpoint_id=path, no_dist=dist_info.is_single)
    except (CheckpointException, OSError) as error:
        hint = f"; {previous} is intact" if previous else ""
        raise InputError(
            f"{path}: cannot be saved: {_reason(error)}{hint}; free some space or choose another folder"
        ) from None
    metadata = {"folder": name, "train_state": dataclasses.asdict(train_state)}
    on_main_rank(dist_info, lambda: atomic_write_text(folder / LAST, json.dumps(metadata, indent=1) + "\n"))
    on_main_rank(dist_info, lambda: _remove_stale(folder, keep=name))
    on_main_rank(dist_info, lambda: delete_stale_averages(folder, train_state))


def load_sharded(folder: Path, model: AnyModel, optimizer: torch.optim.Optimizer, dist_info: DistributedInfo) -> TrainState:
    """Puts a run back to where its last checkpoint was made, by however many processes; afresh where there is none."""
    metadata = on_main_rank(dist_info, lambda: _read_metadata(folder))
    if metadata is None:
        return TrainState()
    path, train_state = metadata
    try:  # in place: parameters and moments stay the ones that others hold
        with _suppress_single_process_warning():
            torch_checkpoint.load(_named_tensors(model, optimizer), checkpoint_id=path, no_dist=dist_info.is_single)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise InputError(
            f"{path}: not this model's checkpoint, or not whole ({_reason(error)}); remove {LAST} to train afresh"
        ) from None
    return train_state


def gather_state_dict(model: AnyModel, dist_info: DistributedInfo) -> dict[str, Tensor] | None:
    """All weights on rank 0's host, under the names that one process gives them; every rank has to come in."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in unique_state_dict(model).items():  # one after the other: a device needs room for one more tensor only
        full = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        if dist_info.is_main:
            tensors[name] = full.cpu()
    return tensors if dist_info.is_main else None


def unshard(model: AnyModel) -> AnyModel:
    """The model itself, or of shards a copy that nobody else has a part of; every rank has to come in."""
    tensors = {name: tensor.detach() for name, tensor in unique_state_dict(model).items()}
    if not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        return model
    copy = build_on_meta(model.spec)
    full = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}
    load_state(copy, full, "the model in shards", assign=True)
    return copy.to(model.device).train(model.training)


def load_full_state_dict(model: AnyModel, tensors: Mapping[str, Tensor], location: str) -> None:
    """Whole tensors, which every rank has, into a model in shards or in one piece."""
    current = unique_state_dict(model)
    load_state(model, {name: _shard_like(tensor, current.get(name)) for name, tensor in tensors.items()}, location, assign=False)


def _shard_like(tensor: Tensor, like: Tensor | None) -> Tensor:
    if not isinstance(like, DTensor) or like.shape != tensor.shape:  # of another shape it is refused by name
        return tensor
    local = tensor.to(like.device)
    return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)  # everybody has it


def _named_tensors(model: AnyModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The very tensors of model and optimiser, by name; an optimiser that has not stepped is given its moments."""
    tensors = {f"model.{name}": tensor.detach() for name, tensor in unique_state_dict(model).items()}
    moments: Mapping[str, Mapping[str, Tensor]] = get_optimizer_state_dict(model, optimizer)["state"]  # type: ignore[assignment]
    return tensors | {f"optimizer.{name}.{key}": t for name, states in moments.items() for key, t in states.items()}


def _read_metadata(folder: Path) -> tuple[Path, TrainState] | None:
    """The checkpoint in use, and where its run stood."""
    path = folder / LAST
    if not path.is_file():
        return None
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
        return folder / metadata["folder"], TrainState(**metadata["train_state"])
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{path}: not a note of a checkpoint of qkv's; remove it to train afresh") from None


def _new_checkpoint_folder(folder: Path, step: int) -> tuple[str | None, str]:
    """An empty folder for the next checkpoint: the name of the one in use, which is not touched, and the new one's."""
    existing = _read_metadata(folder)
    previous, name = None if existing is None else existing[0].name, f"last-{step}"
    if name == previous:
        name += "-again"
    _remove_stale(folder, keep=previous)
    try:
        (folder / name).mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{folder / name}: cannot be made: {error.strerror}; choose another folder") from None
    return previous, name


def _remove_stale(folder: Path, *, keep: str | None) -> None:
    """Lets checkpoints go that no note names: older ones, and those that a kill cut short."""
    for path in folder.glob("last-*"):
        if path.is_dir() and path.name != keep:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _suppress_single_process_warning() -> Iterator[None]:
    """One process may take up a checkpoint of many; torch warns even where it was told so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _reason(error: BaseException) -> str:
    """The first rank's own words, without the traceback that they came with."""
    failures = getattr(error, "failures", None) or {}
    inner = next((failure[0] for failure in failures.values()), error)
    if "inline_container" in str(inner):  # what torch's writer says when a file does not grow
        return "the disk is full, or it failed"
    return str(inner).splitlines()[0] if str(inner) else type(inner).__name__
