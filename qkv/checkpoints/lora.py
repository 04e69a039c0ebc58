"""LoRA runs as files: the trained weights are stored apart from those of the base model.

A LoRA run folder holds `lora.safetensors` (the LoRA weights and the head) instead of all weights, and `lora.json`: the
name of the base model and a digest of its backbone, so that no other model is mistaken for it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from qkv.checkpoints.bundle import ModelBundle
from qkv.checkpoints.hf_checkpoint import read_json
from qkv.checkpoints.state import AnyModel, detached_state_dict, load_state, unique_state_dict
from qkv.errors import InputError
from qkv.files import atomic_write_text
from qkv.nn.construction import build_on_meta, set_features_and_lora
from qkv.nn.model import is_head_or_lora

LORA_FILE = "lora.safetensors"
BASE_REFERENCE = "lora.json"


def trainable_state_dict(model: AnyModel) -> dict[str, Tensor]:
    """Return the tensors that a run saves: all of them, or with LoRA only those that the base model lacks."""
    state_dict = unique_state_dict(model)
    return (
        state_dict
        if model.spec.lora is None
        else {name: tensor for name, tensor in state_dict.items() if is_head_or_lora(name)}
    )


def load_trainable_state_dict(model: AnyModel, tensors: Mapping[str, Tensor], location: str) -> None:
    """Copy the tensors of `trainable_state_dict` into the model's existing parameters."""
    backbone_names = (
        () if model.spec.lora is None else [name for name in unique_state_dict(model) if not is_head_or_lora(name)]
    )
    load_state(model, tensors, location, assign=False, allow_missing=backbone_names)


def backbone_digest(model: AnyModel) -> str:
    """Return a digest of the backbone's weights, which depends neither on the head nor on the file format."""
    hasher = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(unique_state_dict(model).items()):
        if not is_head_or_lora(name):
            hasher.update(f"{name}{list(tensor.shape)}".encode())
            hasher.update(tensor.detach().float().contiguous().cpu().numpy().data)
    return hasher.hexdigest()


def write_base_reference(folder: Path, base: str, base_digest: str) -> None:
    """Write the name of the base model and the digest of its backbone into a run folder."""
    reference = {"base": base, "digest": base_digest}
    if _exists(base):  # for commands that are run in another folder
        reference["path"] = str(Path(base).absolute())
    atomic_write_text(folder / BASE_REFERENCE, json.dumps(reference, indent=2) + "\n")


def check_base_reference(folder: Path, base: str, base_digest: str) -> None:
    """Check that a resumed run has the base model that it was started with."""
    if (folder / BASE_REFERENCE).is_file() and read_base_reference(folder)[1] != base_digest:
        raise InputError(f"{folder}: was started from other weights than '{base}' holds now; choose another --output")


def read_base_reference(folder: Path) -> tuple[str, str]:
    """Return the name or path of a run's base model and the digest of its backbone."""
    reference = read_json(folder / BASE_REFERENCE)
    if not all(isinstance(reference.get(key), str) for key in ("base", "digest")):
        raise InputError(f"{folder / BASE_REFERENCE}: does not name a base and its digest; restore it, or train again")
    path = reference.get("path")
    is_same = isinstance(path, str) and Path(path).parts[-1:] == Path(reference["base"]).parts[-1:]  # base unchanged
    if isinstance(path, str) and is_same and not _exists(reference["base"]) and _exists(path):
        return path, reference["digest"]
    return reference["base"], reference["digest"]


def _exists(path: str) -> bool:
    """Return whether a name from a file is that of a file or folder; it may be no valid path at all."""
    try:
        return os.path.exists(path)
    except ValueError:
        return False


def merge_bundle(bundle: ModelBundle) -> ModelBundle:
    """Return the model with its LoRA weights merged into the base weights, so that it needs no base model."""
    if bundle.model.spec.lora is None:
        raise InputError("this model has no LoRA weights to merge; leave out --merge-lora")
    model = build_on_meta(bundle.model.spec)
    load_state(model, detached_state_dict(bundle.model), "the model with LoRA", assign=True)
    set_features_and_lora(model, model.spec.feature_layers, None)
    return replace(bundle, model=model.eval())
