"""Adam and AdamW, and their state as named tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError
from qkv.nn.model import HEADS, Model
from qkv.train.rows import RowAdamW, large_tables
from qkv.train.sections import Training, Tuning


def optimiser(
    model: Model, recipe: Training, tune: Tuning | None = None, *, by_rows: bool = False
) -> torch.optim.Optimizer:
    """Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019) of what is to be trained; biases and norms are not
    decayed.

    In fine-tuning a layer may have a smaller rate than the one above it (Howard & Ruder 2018), and large embeddings may
    be trained `by_rows` (`qkv.train.rows`).
    """
    if recipe.weight_decay and recipe.optimiser == "adam":
        raise InputError("train.weight_decay: plain adam has none; choose optimiser: adamw, or set it to 0")
    decay = 1.0 if tune is None else tune.layer_decay
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        matrix = parameter.dim() > 1 and not name.endswith("bias")
        share = decay ** below_the_head(model.spec, name) if decay != 1 else 1.0
        groups.setdefault((share, recipe.weight_decay if matrix else 0.0), []).append(parameter)
    # matrices first, the highest layers first: the order in which a checkpoint names their moments
    order = sorted(groups, key=lambda key: (-key[0], -key[1]))
    given = [{"params": groups[key], "weight_decay": key[1], "share": key[0]} for key in order]
    settings = {"lr": recipe.learning_rate, "betas": tuple(recipe.betas), "eps": recipe.epsilon, "fused": True}
    if recipe.optimiser == "adam":
        return torch.optim.Adam(given, **settings)
    tables = large_tables(model) if by_rows else []
    return RowAdamW(given, tables, **settings) if tables else torch.optim.AdamW(given, **settings)


def below_the_head(s: spec.Model, name: str) -> int:
    """How many layers lie between a parameter and the head; of an encoder-decoder, each side's own.

    Embeddings, and the distances that all layers share, lie under all of them; a final norm goes with the head.
    """
    side, *rest = name.split(".")
    if side in HEADS:
        return 0
    part = getattr(s, side, None)
    depth = _depth(part)
    if depth and rest[0] in ("blocks", "layers"):
        return depth - int(rest[1])
    if isinstance(part, spec.Stack) and rest[0] == "norm":
        return 0
    return max(_depth(s.encoder), _depth(s.decoder)) + 1


def _depth(part: object) -> int:
    return part.depth if isinstance(part, spec.Stack) else part.layers if isinstance(part, spec.Recurrent) else 0


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
