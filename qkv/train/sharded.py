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

from qkv.errors import InputError
from qkv.files import write_text
from qkv.nn.model import hollow
from qkv.train.checkpoint import SHARDED_LAST as LAST
from qkv.train.checkpoint import Progress, drop_snapshots
from qkv.train.distributed import Ranks, by_first
from qkv.weights.folder import AnyModel, fill, state


def save_sharded(
    folder: Path, model: AnyModel, optimiser: torch.optim.Optimizer, progress: Progress, ranks: Ranks
) -> None:
    """Everything that the next start needs; every rank has to come in. The older one goes only after this."""
    earlier, name = by_first(ranks, lambda: _begin(folder, progress.step))
    place = folder / name
    try:
        with _alone_without_a_word():
            torch_checkpoint.save(_tensors(model, optimiser), checkpoint_id=place, no_dist=ranks.alone)
    except (CheckpointException, OSError) as error:
        kept = f"; {earlier} is intact" if earlier else ""
        raise InputError(
            f"{place}: cannot be saved: {_reason(error)}{kept}; free some space or choose another folder"
        ) from None
    notes = {"folder": name, "progress": dataclasses.asdict(progress)}
    by_first(ranks, lambda: write_text(folder / LAST, json.dumps(notes, indent=1) + "\n"))
    by_first(ranks, lambda: _remove(folder, keep=name))
    by_first(ranks, lambda: drop_snapshots(folder, progress))


def load_sharded(folder: Path, model: AnyModel, optimiser: torch.optim.Optimizer, ranks: Ranks) -> Progress:
    """Puts a run back to where its last checkpoint was made, by however many processes; afresh where there is none."""
    notes = by_first(ranks, lambda: _notes(folder))
    if notes is None:
        return Progress()
    place, progress = notes
    try:  # in place: parameters and moments stay the ones that others hold
        with _alone_without_a_word():
            torch_checkpoint.load(_tensors(model, optimiser), checkpoint_id=place, no_dist=ranks.alone)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise InputError(
            f"{place}: not this model's checkpoint, or not whole ({_reason(error)}); remove {LAST} to train afresh"
        ) from None
    return progress


def whole(model: AnyModel, ranks: Ranks) -> dict[str, Tensor] | None:
    """All weights on rank 0's host, under the names that one process gives them; every rank has to come in."""
    found: dict[str, Tensor] = {}
    for name, tensor in state(model).items():  # one after the other: a device needs room for one more tensor only
        full = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        if ranks.first:
            found[name] = full.cpu()
    return found if ranks.first else None


def in_one_piece(model: AnyModel) -> AnyModel:
    """The model itself, or of shards a copy that nobody else has a part of; every rank has to come in."""
    tensors = {name: tensor.detach() for name, tensor in state(model).items()}
    if not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        return model
    copy = hollow(model.spec)
    full = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}
    fill(copy, full, "the model in shards", assign=True)
    return copy.to(model.device).train(model.training)


def refill(model: AnyModel, tensors: Mapping[str, Tensor], where: str) -> None:
    """Whole tensors, which every rank has, into a model in shards or in one piece."""
    wanted = state(model)
    fill(model, {name: _cut(tensor, wanted.get(name)) for name, tensor in tensors.items()}, where, assign=False)


def _cut(tensor: Tensor, like: Tensor | None) -> Tensor:
    if not isinstance(like, DTensor) or like.shape != tensor.shape:  # of another shape it is refused by name
        return tensor
    local = tensor.to(like.device)
    return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)  # everybody has it


def _tensors(model: AnyModel, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The very tensors of model and optimiser, by name; an optimiser that has not stepped is given its moments."""
    found = {f"model.{name}": tensor.detach() for name, tensor in state(model).items()}
    moments: Mapping[str, Mapping[str, Tensor]] = get_optimizer_state_dict(model, optimiser)["state"]  # type: ignore[assignment]
    return found | {f"optimiser.{name}.{kind}": t for name, parts in moments.items() for kind, t in parts.items()}


def _notes(folder: Path) -> tuple[Path, Progress] | None:
    """The checkpoint in use, and where its run stood."""
    path = folder / LAST
    if not path.is_file():
        return None
    try:
        notes = json.loads(path.read_text(encoding="utf-8"))
        return folder / notes["folder"], Progress(**notes["progress"])
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{path}: not a note of a checkpoint of qkv's; remove it to train afresh") from None


def _begin(folder: Path, step: int) -> tuple[str | None, str]:
    """An empty folder for the next checkpoint: the name of the one in use, which is not touched, and the new one's."""
    found = _notes(folder)
    earlier, name = None if found is None else found[0].name, f"last-{step}"
    if name == earlier:
        name += "-again"
    _remove(folder, keep=earlier)
    try:
        (folder / name).mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{folder / name}: cannot be made: {error.strerror}; choose another folder") from None
    return earlier, name


def _remove(folder: Path, *, keep: str | None) -> None:
    """Lets checkpoints go that no note names: older ones, and those that a kill cut short."""
    for place in folder.glob("last-*"):
        if place.is_dir() and place.name != keep:
            shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _alone_without_a_word() -> Iterator[None]:
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
