"""Adam and AdamW, and their state as named tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qkv.train.recipe import Training


def optimiser(model: nn.Module, recipe: Training) -> torch.optim.Optimizer:
    """Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019); vectors and scalars are not decayed."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    decay = recipe.weight_decay if recipe.optimiser == "adamw" else 0.0
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
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
    opt.load_state_dict({"state": state, "param_groups": opt.state_dict()["param_groups"]})
