"""LoRA adapters in PEFT's format as folders: adapter_config.json and adapter_model.safetensors, and a base model."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from qkv import spec
from qkv.checkpoints.hf_checkpoint import (
    CONFIG_FILE,
    WEIGHTS_FILES,
    hf_config_text,
    is_checkpoint,
    read_json,
    read_weights,
    write_checkpoint,
)
from qkv.checkpoints.hub import resolve
from qkv.checkpoints.lora import BASE_REFERENCE, read_base_reference
from qkv.checkpoints.pickle_io import load_pickle
from qkv.checkpoints.safetensors_io import load_tensors, save_tensors
from qkv.errors import InputError, quote
from qkv.families.hf.convert import ConvertedCheckpoint
from qkv.families.hf.format import labels_from_hf_config
from qkv.families.hf.peft import convert_adapter, to_peft
from qkv.families.hf.peft_config import parse_adapter_config
from qkv.files import atomic_write_text
from qkv.nn.lora import LORA_PARAMETERS

ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_OLD_WEIGHTS_FILE = "adapter_model.bin"
_BASE_FOLDER = "base"  # of a base model that had no Hugging Face form


def is_adapter(folder: Path) -> bool:
    """Return whether a folder has a PEFT adapter and no weights of a whole model."""
    has_weights = any((folder / name).is_file() for name in ("spec.json", *WEIGHTS_FILES))
    return (folder / ADAPTER_CONFIG_FILE).is_file() and not has_weights


def read_adapter(
    folder: Path, base: str | Path | None, labels: Sequence[str] | None = None
) -> tuple[ConvertedCheckpoint, Path]:
    """Read an adapter with its base model.

    Args:
        folder: the adapter's folder.
        base: the base model, a checkpoint in Hugging Face's format; None: the one that the adapter names.
        labels: the names of the head's outputs; None: those of the adapter's or the base model's config.json.

    Returns:
        The model with LoRA weights in our terms, and the folder of the base model.
    """
    adapter = parse_adapter_config(read_json(folder / ADAPTER_CONFIG_FILE), str(folder / ADAPTER_CONFIG_FILE))
    base_folder = _find_base(folder, base, adapter.base)
    if labels is None and is_checkpoint(folder):  # a config.json next to the adapter has its labels
        config = read_json(folder / CONFIG_FILE)
        labels = labels_from_hf_config(config, 0) if config.get("id2label") else None
    checkpoint, merged = convert_adapter(
        adapter,
        _read_adapter_tensors(folder),
        read_json(base_folder / CONFIG_FILE),
        read_weights(base_folder),
        str(folder),
        labels,
    )
    if merged:
        reason = f"{len(merged)} layers such as {quote(merged[0])} have no LoRA weights in qkv"
        warnings.warn(f"{folder}: {reason}; their updates were merged into the base model", stacklevel=2)
    return checkpoint, base_folder


def _read_adapter_tensors(folder: Path) -> dict[str, Tensor]:
    if not (folder / ADAPTER_WEIGHTS_FILE).is_file() and (folder / _OLD_WEIGHTS_FILE).is_file():
        return load_pickle(folder / _OLD_WEIGHTS_FILE)
    return load_tensors(folder / ADAPTER_WEIGHTS_FILE)[0]


def _find_base(folder: Path, base: str | Path | None, named_base: str | None) -> Path:
    """Return the folder of the base model: the caller's choice, the one that the adapter names, or one inside it."""
    hint = "give it with --base (in Python: base=)"
    if base is None and is_checkpoint(folder / _BASE_FOLDER):
        return folder / _BASE_FOLDER
    name = base if base is not None else named_base
    if not name:
        raise InputError(f"{folder / ADAPTER_CONFIG_FILE}: names no base model; {hint}")
    try:
        base_folder = resolve(name)
    except InputError as error:
        raise InputError(f"{folder}: its base model {quote(str(name))} cannot be loaded ({error}); {hint}") from None
    if not is_checkpoint(base_folder) or is_adapter(base_folder) or (base_folder / "spec.json").is_file():
        reason = "is no checkpoint in Hugging Face's format"
        raise InputError(f"{folder}: its base model {quote(str(name))} {reason}; export it (qkv export), then {hint}")
    return base_folder


def write_adapter(folder: Path, model: spec.Model, tensors: Mapping[str, Tensor], run: Path | None) -> None:
    """Write a model with LoRA weights as an adapter that PEFT reads.

    The base model is that of the run if it is in Hugging Face's format; otherwise it is written next to the adapter.

    Args:
        folder: the adapter's folder.
        model: the spec, with `lora` set.
        tensors: all tensors of the model under our names.
        run: the folder that the model was loaded from, which may refer to its base model.
    """
    base = _find_hf_base(run)
    base_folder = folder / _BASE_FOLDER
    config, adapter_tensors = to_peft(model, tensors, base or os.path.abspath(base_folder))
    plain = replace(model, lora=None)
    if base is None:
        weights = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in LORA_PARAMETERS}
        write_checkpoint(base_folder, plain, weights)
    atomic_write_text(folder / CONFIG_FILE, hf_config_text(plain))
    save_tensors(folder / ADAPTER_WEIGHTS_FILE, adapter_tensors, {"format": "pt"})
    atomic_write_text(folder / ADAPTER_CONFIG_FILE, json.dumps(config, indent=2) + "\n")


def _find_hf_base(run: Path | None) -> str | None:
    """Return the name or the absolute path of a run's base model; None if it is not in Hugging Face's format."""
    if run is None or not (run / BASE_REFERENCE).is_file():
        return None
    name = read_base_reference(run)[0]
    base_folder = resolve(name)
    if not is_checkpoint(base_folder) or (base_folder / "spec.json").is_file() or is_adapter(base_folder):
        return None
    return os.path.abspath(name) if Path(name).is_dir() else name
