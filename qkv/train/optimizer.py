"""Adam and AdamW, and their state as named tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError
from qkv.nn.model import HEAD_MODULES, Model
from qkv.recipe.schema import FinetuneConfig, TrainConfig
from qkv.train.perf.lazy_adamw import LazyEmbeddingAdamW, find_lazy_embeddings


def build_optimizer(
    model: Model, train_config: TrainConfig, finetune: FinetuneConfig | None = None, *, lazy_embeddings: bool = False
) -> torch.optim.Optimizer:
    """Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019) of what is to be trained; biases and norms are not
    decayed.

    In fine-tuning a layer may have a smaller rate than the one above it (Howard & Ruder 2018), and large embeddings may
    be trained lazily (`qkv.train.perf.lazy_adamw`).
    """
    if train_config.weight_decay and train_config.optimizer == "adam":
        raise InputError("train.weight_decay: plain adam has none; choose optimizer: adamw, or set it to 0")
    layer_decay = 1.0 if finetune is None else finetune.layerwise_lr_decay
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.dim() > 1 and not name.endswith("bias")
        lr_scale = layer_decay ** layers_below_head(model.spec, name) if layer_decay != 1 else 1.0
        groups.setdefault((lr_scale, train_config.weight_decay if is_matrix else 0.0), []).append(parameter)
    # matrices first, the highest layers first: the order in which a checkpoint names their moments
    order = sorted(groups, key=lambda key: (-key[0], -key[1]))
    param_groups = [{"params": groups[key], "weight_decay": key[1], "lr_scale": key[0]} for key in order]
    settings = {"lr": train_config.learning_rate, "betas": tuple(train_config.betas), "eps": train_config.adam_epsilon, "fused": True}
    if train_config.optimizer == "adam":
        return torch.optim.Adam(param_groups, **settings)
    embeddings = find_lazy_embeddings(model) if lazy_embeddings else []
    return LazyEmbeddingAdamW(param_groups, embeddings, **settings) if embeddings else torch.optim.AdamW(param_groups, **settings)


def layers_below_head(s: spec.Model, name: str) -> int:
    """How many layers lie between a parameter and the head; of an encoder-decoder, each side's own.

    Embeddings, and the distances that all layers share, lie under all of them; a final norm goes with the head.
    """
    side, *rest = name.split(".")
    if side in HEAD_MODULES:
        return 0
    module_spec = getattr(s, side, None)
    num_layers = _num_layers(module_spec)
    if num_layers and rest[0] in ("blocks", "layers"):
        return num_layers - int(rest[1])
    if isinstance(module_spec, spec.TransformerStack) and rest[0] == "norm":
        return 0
    return max(_num_layers(s.encoder), _num_layers(s.decoder)) + 1


def _num_layers(module_spec: object) -> int:
    return module_spec.num_layers if isinstance(module_spec, spec.TransformerStack) else module_spec.layers if isinstance(module_spec, spec.RecurrentEncoder) else 0


def optimizer_state_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Moments and step counts, named by the parameter's number."""
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": tensor for index, tensors in state.items() for name, tensor in tensors.items()}


def load_optimizer_state(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_state_tensors`."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, name = key.split(".")
        state.setdefault(int(index), {})[name] = tensor
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        for name in ("exp_avg", "exp_avg_sq"):
            if state.get(index, {}).get(name, torch.empty(0)).shape != parameter.shape:
                raise ValueError(f"no {name} for parameter {index}")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
