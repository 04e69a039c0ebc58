"""Hugging Face checkpoint folders, read and written: config.json and weights in one file or in shards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from qkv import families, files, spec
from qkv.checkpoints.pickle_io import load_pickle
from qkv.checkpoints.safetensors_io import load_tensors, save_tensors
from qkv.errors import InputError, quote
from qkv.families.hf.convert import ConvertedCheckpoint, convert_checkpoint, to_hf_checkpoint, to_hf_config
from qkv.families.hf.format import HFConfig
from qkv.files import atomic_write_text

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
WEIGHTS_FILES = (WEIGHTS_FILE, f"{WEIGHTS_FILE}.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder has a Hugging Face config.json."""
    return (folder / CONFIG_FILE).is_file()


def read_checkpoint(folder: Path, head: str | None = None, labels: Sequence[str] | None = None) -> ConvertedCheckpoint:
    """Read a checkpoint folder with the head that its `architectures` entry names, or with another one."""
    config = read_json(folder / CONFIG_FILE)
    # an unknown family is reported before its weights are read
    families.by_model_type(config.get("model_type"), str(folder / CONFIG_FILE))
    return convert_checkpoint(config, read_weights(folder), str(folder), head, labels)


def write_checkpoint(folder: Path, model: spec.Model, tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors as transformers reads them."""
    config, hf_tensors = to_hf_checkpoint(model, tensors)
    atomic_write_text(folder / CONFIG_FILE, _dump_json(config))
    save_tensors(folder / WEIGHTS_FILE, hf_tensors, {"format": "pt"})


def hf_config_text(model: spec.Model) -> str:
    """Return the content of a model's config.json."""
    return _dump_json(to_hf_config(model))


def _dump_json(config: HFConfig) -> str:
    return json.dumps(config, indent=2) + "\n"


def read_json(path: Path) -> HFConfig:
    """Read a JSON object from a file; any other content is refused by name."""
    content = files.read_json(path)
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds no JSON object; restore it from where the checkpoint came from")
    return content


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint; safetensors files are memory-mapped."""
    weights_path = next((folder / name for name in WEIGHTS_FILES if (folder / name).is_file()), None)
    if weights_path is None:
        raise InputError(f"{folder}: has no weights ({WEIGHTS_FILE}, its shards, or pytorch_model.bin)")
    if weights_path.suffix != ".json":
        return _read_file(weights_path)
    tensors: dict[str, Tensor] = {}
    for shard, names in _read_shard_index(weights_path).items():
        shard_tensors = _read_file(weights_path.parent / shard) if (weights_path.parent / shard).is_file() else None
        if shard_tensors is None:
            raise InputError(f"{weights_path.parent / shard}: this shard is missing; {weights_path.name} names it")
        for name in names:
            if name not in shard_tensors:
                raise InputError(
                    f"{weights_path.parent / shard}: lacks {quote(name)}, which {weights_path.name} places there"
                )
        tensors |= shard_tensors
    return tensors


def _read_shard_index(index: Path) -> dict[str, list[str]]:
    weight_map: Any = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: has no weight_map; restore it from where the checkpoint came from")
    shards: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if Path(str(shard)).name != shard:
            raise InputError(f"{index}: {quote(shard)} is not a file name in the same folder")
        shards.setdefault(shard, []).append(name)
    return shards


def _read_file(path: Path) -> dict[str, Tensor]:
    return load_pickle(path) if path.suffix == ".bin" else load_tensors(path)[0]
