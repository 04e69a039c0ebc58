"""Initialization of newly built models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qkv import spec
from qkv.nn.attention import Attention
from qkv.nn.stack import Stack


@runtime_checkable
class InitsItself(Protocol):
    """Module that draws its own parameters, those of its children excepted."""

    def init_weights(self, std: float | None) -> None:
        """Draw the parameters with this standard deviation; None: the module's default."""


def init_weights(s: spec.Model, modules: Iterable[nn.Module]) -> None:
    """Draw the parameters of these modules: normal with `init_std`, or Glorot uniform if the spec has none.

    Recurrent cells keep PyTorch's initialization.
    """
    modules = list(modules)
    for module in modules:
        if isinstance(module, nn.Linear | nn.Conv2d):
            _init_matrix(module.weight, s.init_std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, InitsItself):
            module.init_weights(s.init_std)
    for module in modules:
        if isinstance(module, nn.Embedding):  # after the matrices: a tied output matrix is initialized as an embedding
            nn.init.normal_(module.weight, std=s.init_std or module.embedding_dim**-0.5)
        elif (
            isinstance(module, Attention) and module.q is not None and module.spec.score_fn == "dot" and not s.init_std
        ):
            with torch.no_grad():  # small initial queries instead of scaled scores, as in T5 (Raffel et al. 2020)
                module.q.weight.mul_(module.spec.q_head_dim**-0.5)
        elif isinstance(module, Stack) and module.spec.scaled_residual_init:
            _scale_residual_init(module)


def _init_matrix(weight: Tensor, std: float | None) -> None:
    if std is None:
        nn.init.xavier_uniform_(weight)
    else:
        nn.init.normal_(weight, std=std)


def _scale_residual_init(stack: Stack) -> None:
    """Divide the output matrix of each of the N sublayers by sqrt(N), so that the residual sum keeps its variance."""
    suffixes = ("self_attention.o.weight", "cross_attention.o.weight", "feedforward.down.weight")
    residual_weights = [weight for name, weight in stack.named_parameters() if name.endswith(suffixes)]
    with torch.no_grad():
        for weight in residual_weights:
            weight.mul_(len(residual_weights) ** -0.5)


class SkipInitOnMeta(TorchFunctionMode):
    """Skip in-place operations on meta tensors: they have no effect, but cost time for a large model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.startswith("_") and name != "requires_grad_":
            tensor = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **(kwargs or {}))
