"""Adam, AdamW and SGD, and their state as named tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError
from qkv.nn.model import HEAD_MODULES, Model
from qkv.recipe.schema import TrainConfig
from qkv.train.perf.lazy_adamw import LazyEmbeddingAdamW, find_lazy_embeddings


def build_optimizer(
    model: Model,
    train_config: TrainConfig,
    layerwise_lr_decay: float = 1.0,
    *,
    head_lr_factor: float = 1.0,
    lazy_embeddings: bool = False,
) -> torch.optim.Optimizer:
    """Build Adam (Kingma & Ba 2015), AdamW (Loshchilov & Hutter 2019) or SGD of the trainable parameters.

    Args:
        model: the model; biases and norms have no weight decay.
        train_config: optimizer, learning rate, betas, epsilon and weight decay.
        layerwise_lr_decay: learning rate of a layer relative to the layer above it (Howard & Ruder 2018).
        head_lr_factor: learning rate of the head relative to that of the backbone's last layer.
        lazy_embeddings: update large embeddings row by row (`qkv.train.perf.lazy_adamw`).
    """
    if train_config.weight_decay and train_config.optimizer == "adam":
        raise InputError("train.weight_decay: plain adam has none; choose optimizer: adamw, or set it to 0")
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.dim() > 1 and not name.endswith("bias")
        lr_scale = layerwise_lr_decay ** layers_below_head(model.spec, name) if layerwise_lr_decay != 1 else 1.0
        lr_scale *= head_lr_factor if name.split(".")[0] in HEAD_MODULES else 1.0
        groups.setdefault((lr_scale, train_config.weight_decay if is_matrix else 0.0), []).append(parameter)
    # matrices first, the highest layers first: checkpoints number the moments in this order
    order = sorted(groups, key=lambda key: (-key[0], -key[1]))
    param_groups = [{"params": groups[key], "weight_decay": key[1], "lr_scale": key[0]} for key in order]
    if train_config.optimizer in ("sgd", "nt_asgd"):
        return torch.optim.SGD(param_groups, lr=train_config.learning_rate)
    beta1, beta2 = train_config.betas
    settings: dict[str, Any] = {"lr": train_config.learning_rate, "betas": (beta1, beta2), "fused": True}
    settings["eps"] = train_config.adam_epsilon
    if train_config.optimizer == "adam":
        return torch.optim.Adam(param_groups, **settings)
    embeddings = find_lazy_embeddings(model) if lazy_embeddings else []
    if embeddings:
        return LazyEmbeddingAdamW(param_groups, embeddings, **settings)
    return torch.optim.AdamW(param_groups, **settings)


def layers_below_head(model_spec: spec.Model, name: str) -> int:
    """Return the number of layers from a parameter up to the head; in an encoder-decoder, those of its own side.

    Embeddings and position biases that all layers share are below all layers; a final norm counts as part of the head.
    """
    side, *rest = name.split(".")
    if side in HEAD_MODULES:
        return 0
    module_spec = getattr(model_spec, side, None)
    num_layers = _num_layers(module_spec)
    if num_layers and rest[0] in ("blocks", "layers"):
        return num_layers - int(rest[1])
    if isinstance(module_spec, spec.TransformerStack) and rest[0] == "norm":
        return 0
    return max(_num_layers(model_spec.encoder), _num_layers(model_spec.decoder)) + 1


def _num_layers(module_spec: object) -> int:
    if isinstance(module_spec, spec.TransformerStack):
        return module_spec.num_layers
    return module_spec.layers if isinstance(module_spec, spec.RecurrentEncoder | spec.RecurrentStack | spec.BiLM) else 0


def optimizer_state_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return moments and step counts, named by the number of the parameter."""
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": tensor for index, tensors in state.items() for name, tensor in tensors.items()}


def load_optimizer_state(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load what `optimizer_state_tensors` returned; moments that do not fit a parameter raise a ValueError.

    A parameter that is frozen at the start of training may have no moments yet.
    """
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, name = key.split(".")
        state.setdefault(int(number), {})[name] = tensor
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = () if isinstance(optimizer, torch.optim.SGD) else ("exp_avg", "exp_avg_sq")
    for index, parameter in enumerate(parameters):
        for name in moments if parameter.requires_grad or index in state else ():
            if state.get(index, {}).get(name, torch.empty(0)).shape != parameter.shape:
                raise ValueError(f"no {name} for parameter {index}")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
