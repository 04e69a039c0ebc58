"""LoRA: frozen matrices, each with a trainable low-rank update (Hu et al. 2022).

A model with LoRA has `spec.lora` set. Its parameters keep their names, and each adapted linear layer has two more,
`lora_A` and `lora_B` (A and B in the paper).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError, did_you_mean
from qkv.nn.attention import Attention
from qkv.nn.block import Block
from qkv.nn.dropout import dropout
from qkv.nn.feedforward import FeedForward

TARGET_MODULES = ("q", "k", "v", "o", "up", "gate", "down")
LORA_PARAMETERS = ("lora_A", "lora_B")


class LoRALinear(nn.Linear):
    """W x + b + alpha / rank * B A x. B is initialized to zero, so that the output is unchanged before training."""

    def __init__(self, linear: nn.Linear, s: spec.LoraConfig):
        nn.Module.__init__(self)  # nn.Linear would allocate a matrix
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.scaling, self.dropout = s.alpha / s.rank, s.dropout
        self.lora_A = nn.Parameter(linear.weight.new_empty(s.rank, self.in_features))
        self.lora_B = nn.Parameter(linear.weight.new_empty(self.out_features, s.rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B)

    def forward(self, x: Tensor) -> Tensor:
        output = F.linear(x, self.weight, self.bias)
        dropped = dropout(x, self.dropout) if self.training and self.dropout else x
        return output + F.linear(F.linear(dropped, self.lora_A), self.lora_B) * self.scaling  # [T, out]

    @torch.no_grad()
    def to_linear(self) -> nn.Linear:
        """Return an equivalent linear layer with the update merged into its matrix."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        linear.weight = nn.Parameter(self.weight + self.lora_B @ self.lora_A * self.scaling)
        linear.bias = self.bias
        return linear


def add_lora(model: nn.Module, s: spec.LoraConfig) -> None:
    """Add newly initialized LoRA weights to the target layers of every block."""
    for name in s.target_modules:
        if name not in TARGET_MODULES:
            raise InputError(f"lora.target_modules: there is no layer '{name}'; {did_you_mean(name, TARGET_MODULES)}")
    if s.rank < 1 or not s.target_modules:
        raise InputError("lora: rank must be 1 or more, and target_modules must name at least one layer")
    linears = list(_target_linears(model))
    for name in s.target_modules:
        if not any(linear_name == name for _, linear_name, _ in linears):
            raise InputError(f"lora.target_modules: no block of this model has a layer '{name}'; leave it out")
    for module, name, linear in linears:
        if name in s.target_modules:
            setattr(module, name, LoRALinear(linear, s))


def merge_lora(model: nn.Module) -> None:
    """Merge LoRA weights into the matrices that they adapt."""
    for module, name, linear in list(_target_linears(model)):
        if isinstance(linear, LoRALinear):
            setattr(module, name, linear.to_linear())


def _target_linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield the linear layers that LoRA can adapt, as (module, name, layer); heads are trained in full instead."""
    for block in (m for m in model.modules() if isinstance(m, Block)):
        for sublayer in (p for p in block.children() if isinstance(p, Attention | FeedForward)):
            yield from (
                (sublayer, name, child) for name, child in sublayer.named_children() if isinstance(child, nn.Linear)
            )
