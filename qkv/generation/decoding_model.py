"""A copy of a model that is fast to decode with: LoRA merged, query, key and value projections fused, in one dtype."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from qkv.checkpoints.state import detached_state_dict, load_state
from qkv.nn.attention import Attention
from qkv.nn.lora import merge_lora
from qkv.nn.model import Model, build_on_meta
from qkv.nn.stack import Stack


class DecodingModel:
    """A copy of a model for one dtype, which follows the weights of the model, and what is captured with it."""

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.model = self._make(model)
        self.versions = _versions(model)
        self.sessions: dict[Any, Any] = {}  # captured graphs, which hold the addresses of the copy's weights

    def refresh(self, model: Model) -> None:
        """Copy the weights again if they changed, in place, so that captured graphs read the new ones."""
        versions = _versions(model)
        if versions == self.versions:
            return
        fresh = self._make(model)
        with torch.no_grad():
            for parameter, new in zip(_tensors(self.model), _tensors(fresh), strict=True):
                parameter.copy_(new)
        self.versions = versions

    @torch.no_grad()
    def _make(self, model: Model) -> Model:
        """Build the copy anew: a compiled model or one with hooks cannot be copied as an object."""
        state = {name: tensor.clone() for name, tensor in detached_state_dict(model).items()}
        duplicate = build_on_meta(model.spec)
        load_state(duplicate, state, "the model", assign=True)
        if model.spec.lora is not None:
            merge_lora(duplicate)
        duplicate.eval().to(model.device, self.dtype)
        decoder = getattr(duplicate, "decoder", None)
        for module in decoder.modules() if isinstance(decoder, Stack) else ():
            if isinstance(module, Attention):
                module.fuse_qkv()
        return duplicate


_COPIES: WeakKeyDictionary[nn.Module, dict[torch.dtype, DecodingModel]] = WeakKeyDictionary()


def decoding_model(model: Model, dtype: torch.dtype) -> DecodingModel:
    """Return the copy of a model for decoding in a dtype; it is made once and follows the model's weights."""
    copies = _COPIES.setdefault(model, {})
    if dtype not in copies:
        copies[dtype] = DecodingModel(model, dtype)
    copies[dtype].refresh(model)
    return copies[dtype]


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _versions(model: nn.Module) -> tuple[int, ...]:
    """Return a number per tensor that changes when its values are changed in place."""
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in _tensors(model))
