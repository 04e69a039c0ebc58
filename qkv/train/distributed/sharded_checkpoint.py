"""Checkpoints of a sharded model with torch's distributed checkpoint; resume works with any number of processes.

`last-<step>/` holds the tensors, with one file per rank. `last.json` names that folder and has the progress of the run;
it is written last and atomically, so that a kill at any moment leaves a complete checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor

from qkv.checkpoints.state import AnyModel, load_state, unique_state_dict
from qkv.checkpoints.unfinished_run import SHARDED_LAST_CHECKPOINT as LAST
from qkv.errors import InputError, quote
from qkv.files import atomic_write_text, parse_json, read_file
from qkv.nn.construction import build_on_meta
from qkv.train.checkpoint import delete_stale_averages
from qkv.train.distributed.processes import DistributedInfo, on_main_rank
from qkv.train.train_state import TrainState, train_state_from

_FOLDER_NAME = re.compile(r"last-[0-9]{1,20}(-again)?")


def save_sharded(
    folder: Path, model: AnyModel, optimizer: torch.optim.Optimizer, train_state: TrainState, dist_info: DistributedInfo
) -> None:
    """Write everything that resume needs, and then delete the previous checkpoint; all ranks must call this."""
    previous, name = on_main_rank(dist_info, lambda: _new_checkpoint_folder(folder, train_state.step))
    path = folder / name
    try:
        with _suppress_single_process_warning():
            save(_named_tensors(model, optimizer), checkpoint_id=path, no_dist=dist_info.is_single)
    except (CheckpointException, OSError) as error:
        hint = f"; {previous} is intact" if previous else ""
        raise InputError(
            f"{path}: cannot be saved: {_reason(error)}{hint}; free some space or choose another folder"
        ) from None
    metadata = {"folder": name, "train_state": dataclasses.asdict(train_state)}
    on_main_rank(dist_info, lambda: atomic_write_text(folder / LAST, json.dumps(metadata, indent=1) + "\n"))
    on_main_rank(dist_info, lambda: _remove_stale(folder, keep=name))
    on_main_rank(dist_info, lambda: delete_stale_averages(folder, train_state))


def load_sharded(
    folder: Path, model: AnyModel, optimizer: torch.optim.Optimizer, dist_info: DistributedInfo
) -> TrainState:
    """Load the last checkpoint of a folder and return its TrainState; a new TrainState if there is none."""
    metadata = on_main_rank(dist_info, lambda: _read_metadata(folder))
    if metadata is None:
        return TrainState()
    path, train_state = metadata
    try:  # in place, because the model and the optimizer keep references to the tensors
        with _suppress_single_process_warning():
            load(_named_tensors(model, optimizer), storage_reader=_SafeReader(path), no_dist=dist_info.is_single)
    except (CheckpointException, *_DAMAGE) as error:
        raise InputError(
            f"{path}: not a complete checkpoint of this model ({_reason(error)}); remove {LAST} to train from the start"
        ) from None
    return train_state


def gather_state_dict(model: AnyModel, dist_info: DistributedInfo) -> dict[str, Tensor] | None:
    """Return all weights on the host of rank 0, None on other ranks; all ranks must call this."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in unique_state_dict(model).items():  # one by one: a device needs memory for one more tensor only
        full = _full_tensor(tensor.detach())
        if dist_info.is_main:
            tensors[name] = full.cpu()
    return tensors if dist_info.is_main else None


def unshard(model: AnyModel) -> AnyModel:
    """Return the model, or a full copy of a sharded one on every rank; all ranks must call this."""
    tensors = {name: tensor.detach() for name, tensor in unique_state_dict(model).items()}
    if not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        return model
    copy: AnyModel = build_on_meta(model.spec)
    full = {name: _full_tensor(tensor) for name, tensor in tensors.items()}
    load_state(copy, full, "the sharded model", assign=True)
    copy.to(model.device).train(model.training)
    return copy


def load_full_state_dict(model: AnyModel, tensors: Mapping[str, Tensor], location: str) -> None:
    """Load full tensors, which every rank has, into a model that may be sharded."""
    current = unique_state_dict(model)
    load_state(
        model,
        {name: _shard_like(tensor, current.get(name)) for name, tensor in tensors.items()},
        location,
        assign=False,
    )


def _full_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _shard_like(tensor: Tensor, like: Tensor | None) -> Tensor:
    if not isinstance(like, DTensor) or like.shape != tensor.shape:  # `load_state` refuses another shape
        return tensor
    local = tensor.to(like.device)
    return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)  # every rank has the data


def _named_tensors(model: AnyModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of model and optimizer by name; an optimizer before its first step gets its moments."""
    tensors = {f"model.{name}": tensor.detach() for name, tensor in unique_state_dict(model).items()}
    moments: Mapping[str, Mapping[str, Tensor]] = get_optimizer_state_dict(model, optimizer)["state"]  # type: ignore[assignment]
    return tensors | {f"optimizer.{name}.{key}": t for name, states in moments.items() for key, t in states.items()}


def _read_metadata(folder: Path) -> tuple[Path, TrainState] | None:
    """Return the folder of the last checkpoint and its TrainState."""
    path = folder / LAST
    if not path.is_file():
        return None
    metadata = parse_json(read_file(path), str(path), allow_nan=True)
    name = metadata.get("folder") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not _FOLDER_NAME.fullmatch(name):
        raise InputError(f"{path}: does not name a checkpoint; remove it to train from the start")
    return folder / name, train_state_from(metadata.get("train_state"), str(path))


class _SafeReader(FileSystemReader):
    """torch's reader, which unpickles the names and sizes of tensors and nothing that could run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        with open(self._get_metadata_path(), "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise ValueError("the file .metadata describes no checkpoint")
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != str(info.relative_path):
                raise ValueError(f"the file .metadata names {quote(str(info.relative_path))} outside its folder")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_value = module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype))
        if not is_value and name not in _METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"the file .metadata contains {quote(f'{module}.{name}')}")
        return super().find_class(module, name)


_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("Path", "PosixPath", "PurePath", "PurePosixPath"),
    "pathlib._local": ("Path", "PosixPath"),
    "collections": ("OrderedDict",),
}
# what torch's reader and an unpickler may raise for damaged files
_DAMAGE = (
    *(OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError, AssertionError),
    *(pickle.UnpicklingError, EOFError, ImportError, MemoryError),
)


def _new_checkpoint_folder(folder: Path, step: int) -> tuple[str | None, str]:
    """Create an empty folder for the next checkpoint; return the names of the current one and of the new one."""
    existing = _read_metadata(folder)
    previous, name = None if existing is None else existing[0].name, f"last-{step}"
    if name == previous:
        name += "-again"
    _remove_stale(folder, keep=previous)
    try:
        (folder / name).mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{folder / name}: cannot be created: {error.strerror}; choose another folder") from None
    return previous, name


def _remove_stale(folder: Path, *, keep: str | None) -> None:
    """Delete all checkpoints except one: older ones, and incomplete ones of a killed run."""
    for path in folder.glob("last-*"):
        if path.is_dir() and path.name != keep:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _suppress_single_process_warning() -> Iterator[None]:
    """Suppress torch's warning about a single process, which may load a checkpoint of several."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _reason(error: BaseException) -> str:
    """Return the error message of the first rank, without its traceback."""
    failures = getattr(error, "failures", None) or {}
    inner = next((failure[0] for failure in failures.values()), error)
    if "inline_container" in str(inner):  # torch's writer if a file cannot grow
        return "the disk is full, or it failed"
    return str(inner).splitlines()[0] if str(inner) else type(inner).__name__
