"""Adam and AdamW, and their state as named tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qkv.errors import InputError
from qkv.train.sections import Training


def optimiser(model: nn.Module, recipe: Training) -> torch.optim.Optimizer:
    """Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019); biases and norms are not decayed."""
    if recipe.weight_decay and recipe.optimiser == "adam":
        raise InputError("train.weight_decay: plain adam has none; choose optimiser: adamw, or set it to 0")
    parameters = list(model.named_parameters())
    matrices = [p for name, p in parameters if p.dim() > 1 and not name.endswith("bias")]
    others = [p for name, p in parameters if p.dim() <= 1 or name.endswith("bias")]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    kind = torch.optim.AdamW if recipe.optimiser == "adamw" else torch.optim.Adam
    return kind(groups, lr=recipe.learning_rate, betas=tuple(recipe.betas), eps=recipe.epsilon, fused=True)


def state_tensors(opt: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Moments and step counts, named by the parameter's number."""
    found = opt.state_dict()["state"]
    return {f"{number}.{name}": tensor for number, parts in found.items() for name, tensor in parts.items()}


def restore(opt: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of `state_tensors`."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, name = key.split(".")
        state.setdefault(int(number), {})[name] = tensor
    parameters = [p for group in opt.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        for name in ("exp_avg", "exp_avg_sq"):
            if state.get(number, {}).get(name, torch.empty(0)).shape != parameter.shape:
                raise ValueError(f"no {name} for parameter {number}")
    opt.load_state_dict({"state": state, "param_groups": opt.state_dict()["param_groups"]})
