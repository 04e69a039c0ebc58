"""A run's checkpoint: weights, optimiser and place in the data, in one file, whole or not there.

There is no random state to keep: what is drawn in a step is a function of the seed and the step.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

from qkv.errors import InputError
from qkv.train.optimiser import restore, state_tensors
from qkv.train.trailing import Trailing
from qkv.weights.adapters import kept, put
from qkv.weights.file import load_tensors, save_tensors
from qkv.weights.folder import AnyModel, state

LAST, BEST = "last.safetensors", "best.safetensors"
SHARDED_LAST = "last.json"  # of a model in shards


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0
    epoch: int = 0
    index: int = 0  # the batch of the epoch that comes next
    best: float | None = None  # the metric, and the step that reached it
    best_step: int = 0
    stale: int = 0  # validations since then
    snapshots: list[int] = field(default_factory=list)  # steps of the weights kept for averaging
    tokens: int = 0
    seconds: float = 0.0  # spent in training steps
    finished: bool = False
    data: str = ""  # a digest of the training pairs: a place among others means nothing


def snapshot(folder: Path, step: int) -> Path:
    return folder / f"step-{step}.safetensors"


def has_last(folder: Path) -> bool:
    """Whether a run was begun there."""
    return (folder / LAST).is_file() or (folder / SHARDED_LAST).is_file()


def check_kept(folder: Path) -> None:
    """The best weights so far have to be there for the end of the run."""
    try:
        load_tensors(folder / BEST)
    except InputError:
        raise InputError(
            f"{folder / BEST}: is missing or damaged, so the run cannot be finished; choose another --output"
        ) from None


def check_finite(model: AnyModel, step: int) -> None:
    """A gradient without bounds spoils the weights before any loss tells: they are looked at before they are kept."""
    norms = torch.stack([norm.to(model.device) for norm in torch._foreach_norm(list(state(model).values()))])
    if not bool(torch.isfinite(_whole(norms)).all()):
        said = f"the weights are not finite by step {step}, and nothing was saved"
        raise InputError(f"{said}; lower train.learning_rate or set train.clip, with another --output")


def _whole(norms: torch.Tensor) -> torch.Tensor:
    full = getattr(norms, "full_tensor", None)  # of shards, each process has a piece
    return norms if full is None else full()


def save_last(
    folder: Path,
    model: AnyModel,
    optimiser: torch.optim.Optimizer,
    progress: Progress,
    trailing: Trailing | None = None,
) -> None:
    """Everything that the next start needs. Only after this are older snapshots let go."""
    tensors = {f"model.{name}": tensor for name, tensor in kept(model).items()}
    tensors |= {f"optimiser.{name}": tensor for name, tensor in state_tensors(optimiser).items()}
    if trailing is not None:
        tensors |= {f"trailing.{name}": tensor for name, tensor in trailing.tensors().items()}
    save_tensors(folder / LAST, tensors, {"progress": json.dumps(dataclasses.asdict(progress))})
    drop_snapshots(folder, progress)


def drop_snapshots(folder: Path, progress: Progress) -> None:
    """Lets weights go that will not be averaged; not before a checkpoint that does without them is there."""
    wanted = {snapshot(folder, step) for step in progress.snapshots}
    for path in folder.glob("step-*.safetensors"):
        if path not in wanted:
            path.unlink(missing_ok=True)


def load_last(
    folder: Path, model: AnyModel, optimiser: torch.optim.Optimizer, trailing: Trailing | None = None
) -> Progress:
    """Puts a run back to where its last checkpoint was made; a fresh Progress where there is none."""
    path = folder / LAST
    if not path.is_file():
        return Progress()
    tensors, notes = load_tensors(path)
    parts: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimiser": {}, "trailing": {}}
    for key, tensor in tensors.items():
        part, _, name = key.partition(".")
        parts.setdefault(part, {})[name] = tensor
    put(model, parts["model"], str(path))
    try:
        progress = Progress(**json.loads(notes["progress"]))
        restore(optimiser, parts["optimiser"])
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise InputError(f"{path}: not a whole checkpoint of qkv's; remove it to train afresh") from None
    if trailing is not None:
        trailing.load(parts["trailing"])
    return progress
