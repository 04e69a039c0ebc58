"""Models with adapters as files: what was trained lies apart from the model that it sits on.

A run's folder then holds `lora.safetensors` (the adapters and the head) in place of all weights, and
`lora.json`: the name of the base model, and a digest of its body, so that no other one is taken for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from qkv import spec
from qkv.checkpoints.hf_checkpoint import read_json
from qkv.checkpoints.model_folder import LORA_FILE, AnyModel, ModelBundle, load, load_state, unique_state_dict
from qkv.checkpoints.safetensors_io import load_tensors
from qkv.errors import InputError
from qkv.files import atomic_write_text
from qkv.nn.model import build_on_meta, is_head_or_lora, set_features_and_lora

BASE_REFERENCE = "lora.json"


def trainable_state_dict(model: AnyModel) -> dict[str, Tensor]:
    """What a run keeps of its model: all of it, or, where adapters sit on a base, what the base does not hold."""
    state_dict = unique_state_dict(model)
    return state_dict if model.spec.lora is None else {name: tensor for name, tensor in state_dict.items() if is_head_or_lora(name)}


def load_trainable_state_dict(model: AnyModel, tensors: Mapping[str, Tensor], location: str) -> None:
    """The inverse of `trainable_state_dict`, into parameters that somebody already holds."""
    backbone_names = () if model.spec.lora is None else [name for name in unique_state_dict(model) if not is_head_or_lora(name)]
    load_state(model, tensors, location, assign=False, allow_missing=backbone_names)


def backbone_digest(model: AnyModel) -> str:
    """The same for the same body, whatever the head and whichever the file format."""
    hasher = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(unique_state_dict(model).items()):
        if not is_head_or_lora(name):
            hasher.update(f"{name}{list(tensor.shape)}".encode())
            hasher.update(tensor.detach().float().contiguous().cpu().numpy().data)
    return hasher.hexdigest()


def write_base_reference(folder: Path, base: str, base_digest: str) -> None:
    """Says which model a run's adapters sit on; `base_digest` is its digest."""
    atomic_write_text(folder / BASE_REFERENCE, json.dumps({"base": base, "digest": base_digest}, indent=2) + "\n")


def check_base_reference(folder: Path, base: str, base_digest: str) -> None:
    """A run goes on from the model that it was begun on."""
    if (folder / BASE_REFERENCE).is_file() and _read_base_reference(folder)[1] != base_digest:
        raise InputError(f"{folder}: was begun on another model than '{base}' is now; choose another --output")


def full_state_dict(folder: Path, model_spec: spec.Model) -> dict[str, Tensor]:
    """All tensors of a run's model: its base's, and its own."""
    base_name, base_digest = _read_base_reference(folder)
    head_kind = None if model_spec.head is None else model_spec.head.kind
    try:
        with torch.random.fork_rng(devices=[]):  # a head is drawn that is then replaced
            base = load(base_name, head=head_kind, labels=None if model_spec.head is None else model_spec.head.labels).model
    except InputError as error:
        reason = f"its adapters sit on '{base_name}', which cannot be loaded ({error})"
        raise InputError(f"{folder}: {reason}; bring it back, or write where it lies into {BASE_REFERENCE}") from None
    if backbone_digest(base) != base_digest:
        reason = f"its adapters were trained on another model than '{base_name}' is now"
        raise InputError(f"{folder}: {reason}; bring that one back, or write where it lies into {BASE_REFERENCE}")
    tensors, _ = load_tensors(folder / LORA_FILE)
    return {name: tensor.detach() for name, tensor in unique_state_dict(base).items() if not is_head_or_lora(name)} | tensors


def _read_base_reference(folder: Path) -> tuple[str, str]:
    reference = read_json(folder / BASE_REFERENCE)
    if not all(isinstance(reference.get(key), str) for key in ("base", "digest")):
        raise InputError(f"{folder / BASE_REFERENCE}: does not name a base and its digest; restore it, or train again")
    return reference["base"], reference["digest"]


def merge_bundle(bundle: ModelBundle) -> ModelBundle:
    """The same model as plain matrices, which need no base."""
    if bundle.model.spec.lora is None:
        raise InputError("this model has no adapters to merge; leave that out")
    model = build_on_meta(bundle.model.spec)
    load_state(model, {name: tensor.detach() for name, tensor in unique_state_dict(bundle.model).items()}, "the model with adapters", assign=True)
    set_features_and_lora(model, model.spec.feature_layers, None)
    return replace(bundle, model=model.eval())
