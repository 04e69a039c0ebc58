"""The checkpoint of a run: weights, optimizer state and data position in one file, which is written atomically.

There is no random state to save: random numbers of a step depend on the seed and the step alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from qkv.checkpoints.lora import load_trainable_state_dict, trainable_state_dict
from qkv.checkpoints.safetensors_io import load_tensors, save_tensors
from qkv.checkpoints.state import AnyModel, unique_state_dict
from qkv.checkpoints.unfinished_run import BEST_WEIGHTS, LAST_CHECKPOINT
from qkv.errors import InputError
from qkv.train.ema import EMA
from qkv.train.optimizer import load_optimizer_state, optimizer_state_tensors
from qkv.train.perf.lazy_adamw import load_pending_decay, pending_decay
from qkv.train.stream_memory import StreamMemory
from qkv.train.train_state import TrainState, parse_train_state


def averaging_path(folder: Path, step: int) -> Path:
    """Return the file of the weights of a step that are averaged at the end."""
    return folder / f"step-{step}.safetensors"


def check_best_exists(folder: Path) -> None:
    """Refuse a run folder whose best weights, which the end of the run needs, cannot be read."""
    try:
        load_tensors(folder / BEST_WEIGHTS)
    except InputError:
        raise InputError(
            f"{folder / BEST_WEIGHTS}: is missing or damaged, so the run cannot be finished; choose another --output"
        ) from None


def check_finite(model: AnyModel, step: int) -> None:
    """Refuse weights that are not finite before they are saved: the loss shows it only a step later."""
    norms = torch.stack(
        [norm.to(model.device) for norm in torch._foreach_norm(list(unique_state_dict(model).values()))]
    )
    if not bool(torch.isfinite(_full_tensor(norms)).all()):
        message = f"the weights are not finite by step {step}, and nothing was saved"
        raise InputError(f"{message}; lower train.learning_rate or set train.max_grad_norm, with another --output")


def _full_tensor(norms: torch.Tensor) -> torch.Tensor:
    full: Callable[[], torch.Tensor] | None = getattr(norms, "full_tensor", None)  # a DTensor, if the model is sharded
    return norms if full is None else full()


def save_checkpoint(
    folder: Path,
    model: AnyModel,
    optimizer: torch.optim.Optimizer,
    train_state: TrainState,
    ema: EMA | None = None,
    memory: Mapping[str, Tensor] | None = None,
) -> None:
    """Write everything that resume needs, and only then delete older weights.

    `memory` is that of the training streams, for a model that carries it from step to step.
    """
    tensors: dict[str, Tensor] = {f"model.{name}": tensor for name, tensor in trainable_state_dict(model).items()}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizer_state_tensors(optimizer).items()}
    if ema is not None:
        tensors |= {f"ema.{name}": tensor for name, tensor in ema.state_dict().items()}
    tensors |= {f"decay.{name}": tensor for name, tensor in pending_decay(optimizer).items()}
    tensors |= {f"memory.{name}": tensor for name, tensor in (memory or {}).items()}
    save_tensors(folder / LAST_CHECKPOINT, tensors, {"train_state": train_state.to_json()})
    delete_stale_averages(folder, train_state)


def delete_stale_averages(folder: Path, train_state: TrainState) -> None:
    """Delete saved weights that will not be averaged; to be called after the checkpoint that no longer lists them."""
    averaging_paths = {averaging_path(folder, step) for step in train_state.averaging_steps}
    for path in folder.glob("step-*.safetensors"):
        if path not in averaging_paths:
            path.unlink(missing_ok=True)


def load_checkpoint(
    folder: Path,
    model: AnyModel,
    optimizer: torch.optim.Optimizer,
    ema: EMA | None = None,
    memory: StreamMemory | None = None,
) -> TrainState:
    """Load the last checkpoint of a folder and return its TrainState; a new TrainState if there is none."""
    path = folder / LAST_CHECKPOINT
    if not path.is_file():
        return TrainState()
    tensors, metadata = load_tensors(path)
    train_state = parse_train_state(metadata.get("train_state", "{}"), str(path))
    tensors_by_prefix: dict[str, dict[str, Tensor]] = {
        prefix: {} for prefix in ("model", "optimizer", "ema", "decay", "memory")
    }
    for key, tensor in tensors.items():
        prefix, _, name = key.partition(".")
        tensors_by_prefix.setdefault(prefix, {})[name] = tensor
    load_trainable_state_dict(model, tensors_by_prefix["model"], str(path))
    is_restart = 0 < train_state.optimizer_restart == train_state.step  # an extended run before its first step
    try:
        if tensors_by_prefix["optimizer"] or not is_restart:
            load_optimizer_state(optimizer, tensors_by_prefix["optimizer"])
        load_pending_decay(optimizer, tensors_by_prefix["decay"])
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError):
        raise InputError(f"{path}: not a complete checkpoint; remove it to train from the start") from None
    if ema is not None:
        ema.load_state_dict(tensors_by_prefix["ema"])
    if memory is not None:
        memory.load_state_dict(tensors_by_prefix["memory"])
    return train_state
