"""A copy of a model that is fast to decode with: LoRA merged, query, key and value projections fused, in one dtype.

On a CPU the weights of linear layers are packed for its kernels, in float32 or int8; the rest is the model's own. The
copy takes 4 bytes per weight of a linear layer, or in int8 2 bytes.
"""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from qkv.checkpoints.state import detached_state_dict, load_state
from qkv.errors import InputError
from qkv.generation.ensemble import Ensemble
from qkv.generation.logits_processors import NEG_INF
from qkv.nn.attention import Attention
from qkv.nn.block import Block
from qkv.nn.construction import build_on_meta
from qkv.nn.host_step import HostStep, can_flatten
from qkv.nn.int8_linear import Int8Linear, choose_kernels
from qkv.nn.lora import merge_lora
from qkv.nn.model import Model
from qkv.nn.packed_linear import PackedLinear, can_pack
from qkv.nn.stack import Stack
from qkv.spec import replace

_MIN_WEIGHTS = 1 << 22  # linear layers of fewer weights are read from the processor's caches, packed or not
_MIN_STEPS = 24  # packing costs as much as it saves in about 16 steps of batch size 1, and in fewer of larger batches
_MIN_LAYER_WEIGHTS = 1 << 12


class DecodingModel:
    """A copy of a model for one dtype, which follows the weights of the model, and what is captured with it."""

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.model = self._make(model)
        self.versions, self.spec = _versions(model), model.spec
        self.sessions: dict[Any, Any] = {}  # captured graphs, which hold the addresses of the copy's weights

    def refresh(self, model: Model) -> None:
        """Copy the weights again if they changed, in place, so that captured graphs read the new ones."""
        versions = _versions(model)
        if versions == self.versions and model.spec is self.spec:
            return
        if model.device.type == "cpu":
            self.model = self._make(model)
        else:
            with torch.no_grad():
                for parameter, new in zip(_tensors(self.model), _tensors(self._make(model)), strict=True):
                    parameter.copy_(new)
            self.model.spec = model.spec
        self.versions, self.spec = versions, model.spec

    @torch.no_grad()
    def _make(self, model: Model) -> Model:
        """Build the copy anew: a compiled model or one with hooks cannot be copied as an object."""
        on_host = model.device.type == "cpu"
        state = {name: x if on_host else x.clone() for name, x in detached_state_dict(model).items()}
        duplicate = build_on_meta(model.spec)
        load_state(duplicate, state, "the model", assign=True)
        if model.spec.lora is not None:
            merge_lora(duplicate)
        duplicate.eval().to(model.device, torch.float32 if on_host else self.dtype)
        for module in duplicate.modules():
            if isinstance(module, Block) and type(module.self_attention) is Attention:
                module.self_attention.fuse_qkv()
        if on_host:
            _fold_head_bias(duplicate)
            _pack_linears(duplicate, self.dtype)
            decoder = getattr(duplicate, "decoder", None)
            if isinstance(decoder, Stack) and can_flatten(decoder):
                decoder.step = HostStep(decoder)  # type: ignore[method-assign]
        return duplicate


def _fold_head_bias(model: Model) -> None:
    """Let the last linear layer add the constant bias of the logits, and suppress tokens by its bias.

    Else each step passes over the logits twice more.
    """
    head = model.head
    if head is None or head.linear is None or (head.final_logits_bias is None and not model.spec.suppress_tokens):
        return
    bias = torch.zeros(head.linear.out_features) if head.linear.bias is None else head.linear.bias.detach().clone()
    if head.final_logits_bias is not None:
        bias += head.final_logits_bias[0]
    bias[list(model.spec.suppress_tokens)] = NEG_INF
    linear = nn.Linear(head.linear.in_features, head.linear.out_features, device="meta")
    linear.weight, linear.bias = head.linear.weight, nn.Parameter(bias, requires_grad=False)
    head.linear, head.final_logits_bias = linear, None
    model.spec = replace(model.spec, suppress_tokens=())


def _pack_linears(model: Model, dtype: torch.dtype) -> None:
    """Replace the linear layers by packed ones, but for those that a fused projection computes."""
    for path, parent in list(model.named_modules()):
        if isinstance(parent, Attention) and type(parent) is not Attention:
            continue  # relative attention reads its weights itself
        is_fused = isinstance(parent, Attention) and parent.qkv is not None
        # the layers of a decoder read a prompt before the first step tells the number of rows
        waits = path.startswith("decoder.") and isinstance(model.decoder, Stack) and can_flatten(model.decoder)
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child.weight.numel() < _MIN_LAYER_WEIGHTS:
                continue
            if is_fused and name in ("q", "k", "v"):
                continue
            packed = Int8Linear(child, choose_kernels()) if dtype == torch.int8 else PackedLinear(child, waits=waits)
            setattr(parent, name, packed)


def check_dtype(model: Model, dtype: str | None) -> None:
    """Refuse a dtype that the device of a model has no fast weights for."""
    on_host = model.device.type == "cpu"
    if dtype == "int8" and not on_host:
        raise InputError("dtype: int8 runs on a CPU; on a GPU choose bf16, or --device cpu")
    if dtype == "bf16" and on_host:
        raise InputError("dtype: bf16 runs on a GPU; on a CPU choose float32 or int8")


def num_int8_layers(model: Model) -> int | None:
    """Return how many linear layers of a model's int8 copies have int8 weights; None: there is no copy."""
    members = model.models if isinstance(model, Ensemble) else [model]
    copies = [_COPIES.get(member, {}).get(torch.int8) for member in members]
    made = [copy.model for copy in copies if copy is not None]
    return sum(isinstance(module, Int8Linear) for copy in made for module in copy.modules()) if made else None


def host_model(model: Model, dtype: str | None, num_steps: int) -> Model:
    """Return what decodes fastest on a CPU: a packed copy of the model, or the model if a copy does not pay.

    Args:
        model: a model that generates; one on another device is returned as it is.
        dtype: "int8" for a copy with int8 weights.
        num_steps: steps of the search. Many short searches with the same weights count as a long one.
    """
    if isinstance(model, Ensemble):
        return Ensemble([host_model(member, dtype, num_steps) for member in model.models], model.mean)
    if model.device.type != "cpu" or _records_attention(model):
        return model
    if dtype == "int8" and _has_int8_kernel():
        return decoding_model(model, torch.int8).model
    if not can_pack() or next(model.parameters()).dtype != torch.float32 or _num_linear_weights(model) < _MIN_WEIGHTS:
        return model
    uses = _USES.setdefault(model, _Uses())
    uses.count(_versions(model), num_steps)
    return decoding_model(model, torch.float32).model if uses.num_steps >= _MIN_STEPS else model


class _Uses:
    """Decoding steps with the same weights."""

    def __init__(self) -> None:
        self.versions: Any = None
        self.num_steps = 0

    def count(self, versions: Any, num_steps: int) -> None:
        """Add steps, or start again if the weights changed."""
        self.num_steps = num_steps + (self.num_steps if versions == self.versions else 0)
        self.versions = versions


def _has_int8_kernel() -> bool:
    choice = choose_kernels()
    if choice.more_rows is None:
        reasons = "; ".join(f"{name}: {error}" for name, error in choice.errors.items())
        warnings.warn(
            f"int8: no kernel of this machine computes it correctly, so float32 is used ({reasons})", stacklevel=3
        )
    return choice.more_rows is not None


def _records_attention(model: Model) -> bool:
    return any(isinstance(module, Attention) and module.hook is not None for module in model.modules())


def _num_linear_weights(model: Model) -> int:
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


_USES: WeakKeyDictionary[nn.Module, _Uses] = WeakKeyDictionary()


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


def _versions(model: nn.Module) -> tuple[tuple[int, int], ...]:
    """Return numbers per tensor that change when it is replaced or its values are changed in place."""
    return tuple((x.data_ptr(), 0 if x.is_inference() else x._version) for x in _tensors(model))
