"""The memory that training takes, compared with the memory of the device before training starts."""

from __future__ import annotations

import torch

from qkv.checkpoints.state import AnyModel
from qkv.errors import InputError
from qkv.recipe.schema import TrainConfig
from qkv.spec.check import total_memory

_FLOAT_BYTES = 4
_COPIES_OF_TRAINED = 3  # gradient, and Adam's first and second moments


def check_training_memory(
    model: AnyModel, train_config: TrainConfig, device: torch.device, num_processes: int = 1
) -> None:
    """Refuse a model that cannot be trained on a device: activations come on top of what is counted here.

    Args:
        model: the model, with frozen parameters marked as such.
        train_config: the strategy and the EMA.
        device: the device that the model will be moved to.
        num_processes: the number of processes that share a sharded model.
    """
    parameters = list(model.parameters())
    num_parameters, num_trained = (sum(p.numel() for p in ps) for ps in (parameters, _trained(parameters)))
    num_copies = num_parameters * (2 if train_config.ema_decay else 1) + _COPIES_OF_TRAINED * num_trained
    needed = _FLOAT_BYTES * num_copies / (num_processes if train_config.strategy == "fsdp" else 1)
    available = _device_memory(device)
    if available is None or needed <= available:
        return
    size = f"{needed / 1e9:,.1f} GB for weights, gradients and the optimizer's state"
    remedy = "choose a smaller model, or train fewer parameters (finetune.lora, finetune.trainable: head)"
    raise InputError(f"training takes {size}, and this {device.type} has {available / 1e9:,.1f} GB; {remedy}")


def _trained(parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def _device_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return total_memory() if device.type == "cpu" else None
