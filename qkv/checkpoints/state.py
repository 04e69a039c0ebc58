"""Tensors of a model by name: state dicts without tied copies, filling a model, initializing missing parameters."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError, quote
from qkv.nn import Decoder, Encoder, EncoderDecoder
from qkv.nn.construction import build_on_meta
from qkv.nn.init import init_weights

AnyModel = Encoder | Decoder | EncoderDecoder

_HEADS = ("head", "aux_head")
_LAYER_NAME = re.compile(r"(encoder|decoder)\.(?:blocks|layers|cells)\.([0-9]+)\.")


def unique_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model; a tied tensor appears once, under its first name."""
    return {name: tensor for name, (canonical, tensor) in _canonical_names(model).items() if name == canonical}


def detached_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return `unique_state_dict` without gradients."""
    return {name: tensor.detach() for name, tensor in unique_state_dict(model).items()}


def _canonical_names(model: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """Return for every name the first name of its tensor, and the tensor."""
    canonical_by_id: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    return {name: (canonical_by_id.setdefault(id(tensor), name), tensor) for name, tensor in tensors.items()}


def check_layer_count(model_spec: spec.Model, names: Iterable[str], location: str) -> None:
    """Refuse a spec with more layers than the checkpoint has tensors for, before any layer is built.

    Args:
        model_spec: the model to build.
        names: the names of the checkpoint's tensors, under our names.
        location: the file or folder in messages.
    """
    in_file = {match.groups() for match in map(_LAYER_NAME.match, names) if match is not None}
    for side, stack in (("encoder", model_spec.encoder), ("decoder", model_spec.decoder)):
        if stack is None:
            continue
        num_layers = stack.num_layers if isinstance(stack, spec.TransformerStack) else stack.layers
        num_in_file = sum(name == side for name, _ in in_file)
        if num_layers > num_in_file:
            reason = f"lacks '{side}.blocks.{num_in_file}'" if num_in_file else f"has no layers of the {side}"
            raise InputError(f"{location}: {reason}; this model has {num_layers} layers in its {side}")


def load_state(
    model: AnyModel, tensors: Mapping[str, Tensor], location: str, *, assign: bool, allow_missing: Collection[str] = ()
) -> None:
    """Put tensors into a model; a missing or unknown name and a wrong shape are refused.

    Args:
        model: the model to fill.
        tensors: tensors under the names of `unique_state_dict`.
        location: the file or folder in messages.
        assign: make the tensors the model's parameters; otherwise copy them into the existing parameters.
        allow_missing: names that `tensors` may lack.
    """
    expected = unique_state_dict(model)
    for name in expected:
        if name not in tensors and name not in allow_missing:
            raise InputError(f"{location}: lacks '{name}', which this model has; is it another model's checkpoint?")
    for name, tensor in tensors.items():
        if name not in expected:
            raise InputError(
                f"{location}: holds {quote(name, 100)}, which this model lacks; is it another model's checkpoint?"
            )
        if not tensor.is_floating_point():
            raise InputError(f"{location}: '{name}' holds {tensor.dtype}; qkv reads weights in floating point only")
        if tensor.shape != expected[name].shape:
            file_shape, model_shape = list(tensor.shape), list(expected[name].shape)
            raise InputError(
                f"{location}: '{name}' has shape {file_shape}, and this model needs {model_shape}; is it another's?"
            )
    # weights in half or double precision are converted to the model's dtype
    converted = {name: tensor.to(expected[name].dtype) for name, tensor in tensors.items()}
    model.load_state_dict(converted, strict=False, assign=assign)
    if assign:
        model.tie_weights()


def build_from_tensors(
    model_spec: spec.Model, tensors: Mapping[str, Tensor], location: str, *, new_head: bool
) -> tuple[AnyModel, tuple[str, ...], tuple[str, ...]]:
    """Build a model and fill it with tensors.

    Args:
        model_spec: the model to build.
        tensors: tensors under our names; tied copies are allowed if they are equal.
        location: the checkpoint in messages.
        new_head: initialize missing head parameters and ignore tensors that the model does not use; otherwise both are
            refused.

    Returns:
        The model, the names of newly initialized parameters, and the names of unused tensors.
    """
    check_layer_count(model_spec, tensors, location)
    model = build_on_meta(model_spec)
    canonical_names = _canonical_names(model)
    tensors = _drop_tied_copies(tensors, canonical_names, location)
    unused: tuple[str, ...] = ()
    if new_head:
        unused = tuple(name for name in tensors if name not in canonical_names)
        tensors = {name: tensor for name, tensor in tensors.items() if name in canonical_names}
    absent = [name for name, (canonical, _) in canonical_names.items() if name == canonical and name not in tensors]
    missing = tuple(sorted(name for name in absent if new_head and name.split(".")[0] in _HEADS))
    load_state(model, tensors, location, assign=True, allow_missing=missing)
    _init_missing(model, missing)
    return model, missing, unused


def _drop_tied_copies(
    tensors: Mapping[str, Tensor], canonical_names: Mapping[str, tuple[str, Tensor]], location: str
) -> dict[str, Tensor]:
    """Return the tensors with each tied one once, under its first name; copies that differ are refused."""
    deduplicated: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        canonical = canonical_names[name][0] if name in canonical_names else name
        if canonical != name and canonical in tensors:
            if not torch.equal(tensor, tensors[canonical]):
                raise InputError(
                    f"{location}: '{name}' and '{canonical}' are one tensor in this model, and differ there"
                )
            continue
        deduplicated[canonical] = tensor
    return deduplicated


def _init_missing(model: AnyModel, missing: Collection[str]) -> None:
    """Allocate and initialize the parameters that no checkpoint held."""
    # each module once, in the order of the names, so that a seed always draws the same values
    modules = list({model.get_submodule(name.rpartition(".")[0]): None for name in missing})
    for module in list(modules):
        loaded_names = [name for name, parameter in module.named_parameters(recurse=False) if not parameter.is_meta]
        if loaded_names == ["weight"] and isinstance(module, nn.Linear):  # an LM head whose weight is the embedding's
            module.bias = nn.Parameter(torch.zeros(module.out_features))
            modules.remove(module)
            continue
        if loaded_names:
            raise InputError(
                f"the checkpoint holds '{loaded_names[0]}' of {type(module).__name__} and lacks the rest of it"
            )
        module.to_empty(device="cpu", recurse=False)
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
            continue
        for _, buffer in module.named_buffers(recurse=False):
            nn.init.zeros_(buffer)
    init_weights(model.spec, modules)
    model.tie_weights()
