"""A run's checkpoint: weights, optimiser and place in the data, in one file, whole or not there.

There is no random state to keep: what is drawn in a step is a function of the seed and the step.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

from qkv.checkpoints.lora import load_trainable_state_dict, trainable_state_dict
from qkv.checkpoints.model_folder import AnyModel, unique_state_dict
from qkv.checkpoints.safetensors_io import load_tensors, save_tensors
from qkv.errors import InputError
from qkv.train.ema import EMA
from qkv.train.optimizer import load_optimizer_state, optimizer_state_tensors

LAST_CHECKPOINT, BEST_WEIGHTS = "last.safetensors", "best.safetensors"
SHARDED_LAST_CHECKPOINT = "last.json"  # of a model in shards


@dataclass
class TrainState:
    """Where a run stands."""

    step: int = 0
    epoch: int = 0
    batch_index: int = 0  # the batch of the epoch that comes next
    best_metric: float | None = None  # the metric, and the step that reached it
    best_step: int = 0
    validations_since_best: int = 0  # validations since then
    averaging_steps: list[int] = field(default_factory=list)  # steps of the weights kept for averaging
    tokens: int = 0
    train_seconds: float = 0.0  # spent in training steps
    finished: bool = False
    data_fingerprint: str = ""  # a digest of the training pairs: a place among others means nothing


def averaging_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step}.safetensors"


def has_checkpoint(folder: Path) -> bool:
    """Whether a run was begun there."""
    return (folder / LAST_CHECKPOINT).is_file() or (folder / SHARDED_LAST_CHECKPOINT).is_file()


def check_best_exists(folder: Path) -> None:
    """The best weights so far have to be there for the end of the run."""
    try:
        load_tensors(folder / BEST_WEIGHTS)
    except InputError:
        raise InputError(
            f"{folder / BEST_WEIGHTS}: is missing or damaged, so the run cannot be finished; choose another --output"
        ) from None


def check_finite(model: AnyModel, step: int) -> None:
    """A gradient without bounds spoils the weights before any loss tells: they are looked at before they are kept."""
    norms = torch.stack([norm.to(model.device) for norm in torch._foreach_norm(list(unique_state_dict(model).values()))])
    if not bool(torch.isfinite(_full_tensor(norms)).all()):
        message = f"the weights are not finite by step {step}, and nothing was saved"
        raise InputError(f"{message}; lower train.learning_rate or set train.max_grad_norm, with another --output")


def _full_tensor(norms: torch.Tensor) -> torch.Tensor:
    full = getattr(norms, "full_tensor", None)  # of shards, each process has a piece
    return norms if full is None else full()


def save_checkpoint(
    folder: Path,
    model: AnyModel,
    optimizer: torch.optim.Optimizer,
    train_state: TrainState,
    ema: EMA | None = None,
) -> None:
    """Everything that the next start needs. Only after this are older snapshots let go."""
    tensors = {f"model.{name}": tensor for name, tensor in trainable_state_dict(model).items()}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizer_state_tensors(optimizer).items()}
    if ema is not None:
        tensors |= {f"ema.{name}": tensor for name, tensor in ema.state_dict().items()}
    save_tensors(folder / LAST_CHECKPOINT, tensors, {"train_state": json.dumps(dataclasses.asdict(train_state))})
    delete_stale_averages(folder, train_state)


def delete_stale_averages(folder: Path, train_state: TrainState) -> None:
    """Lets weights go that will not be averaged; not before a checkpoint that does without them is there."""
    averaging_paths = {averaging_path(folder, step) for step in train_state.averaging_steps}
    for path in folder.glob("step-*.safetensors"):
        if path not in averaging_paths:
            path.unlink(missing_ok=True)


def load_checkpoint(
    folder: Path, model: AnyModel, optimizer: torch.optim.Optimizer, ema: EMA | None = None
) -> TrainState:
    """Puts a run back to where its last checkpoint was made; a fresh TrainState where there is none."""
    path = folder / LAST_CHECKPOINT
    if not path.is_file():
        return TrainState()
    tensors, metadata = load_tensors(path)
    tensors_by_prefix: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}, "ema": {}}
    for key, tensor in tensors.items():
        prefix, _, name = key.partition(".")
        tensors_by_prefix.setdefault(prefix, {})[name] = tensor
    load_trainable_state_dict(model, tensors_by_prefix["model"], str(path))
    try:
        train_state = TrainState(**json.loads(metadata["train_state"]))
        load_optimizer_state(optimizer, tensors_by_prefix["optimizer"])
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise InputError(f"{path}: not a whole checkpoint of qkv's; remove it to train afresh") from None
    if ema is not None:
        ema.load_state_dict(tensors_by_prefix["ema"])
    return train_state
