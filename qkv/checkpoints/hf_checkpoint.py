"""Hugging Face checkpoint folders, in and out: config.json, weights in one file or in shards, their names and ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from qkv import families, spec
from qkv.checkpoints.safetensors_io import load_pickle, load_tensors, save_tensors
from qkv.errors import InputError, did_you_mean
from qkv.families.hf.format import HFConfig, HFFormat, hf_config_from_spec, labels_from_hf_config, spec_from_hf_config
from qkv.families.hf.rules import Drop, ExportDuplicate, Rule, TensorRule, Tie, find_rule, from_hf, to_hf
from qkv.files import atomic_write_text

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
_WEIGHTS_FILES = (WEIGHTS_FILE, f"{WEIGHTS_FILE}.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_LEGACY_NAMES = {"gamma": "weight", "beta": "bias"}  # how checkpoints that came from TensorFlow name a norm's parameters


class ConvertedCheckpoint(NamedTuple):
    """A checkpoint as we see it: our spec, tensors under our names, and the keys of other heads that were left."""

    spec: spec.Model
    tensors: dict[str, Tensor]
    unexpected_keys: tuple[str, ...]


def is_checkpoint(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file()


def read_checkpoint(folder: Path, head: str | None = None, labels: Sequence[str] | None = None) -> ConvertedCheckpoint:
    """Reads a folder under the head that its `architectures` entry names, or under another one."""
    config = read_json(folder / CONFIG_FILE)
    families.by_model_type(str(config.get("model_type")), str(folder / CONFIG_FILE))  # before its weights are looked for
    return convert_checkpoint(config, read_weights(folder), str(folder), head, labels)


def convert_checkpoint(
    config: HFConfig,
    hf_tensors: Mapping[str, Tensor],
    folder: str,
    head: str | None = None,
    labels: Sequence[str] | None = None,
) -> ConvertedCheckpoint:
    """A config and tensors under their names, as one of our families under a head."""
    location = str(Path(folder) / CONFIG_FILE)
    family = families.by_model_type(str(config.get("model_type")), location)
    hf_format: HFFormat = family.HUGGING_FACE
    head_name = head or _declared_head(hf_format, config, location)
    output_labels = tuple(labels) if labels else labels_from_hf_config(config)
    config = hf_format.infer_from_weights(config, hf_tensors)
    model_spec = spec_from_hf_config(family, config, location, head_name, output_labels)
    tensors = _canonical_keys(hf_format, hf_tensors, hf_format.rules(head_name, model_spec))
    if head is None and head_name == "pooler" and not any(find_rule(hf_format.head_rules["pooler"], key) for key in tensors):
        head_name, model_spec = "body", spec_from_hf_config(family, config, location, "body", output_labels)
    model_rules, all_rules = hf_format.rules(head_name, model_spec), hf_format.all_rules()
    relevant = {key: tensor for key, tensor in tensors.items() if find_rule(model_rules, key) or not find_rule(all_rules, key)}
    unexpected_keys = tuple(key for key in tensors if key not in relevant)
    qkv_tensors = from_hf(model_rules, relevant, folder)
    if head is not None and _needs_new_output_layer(hf_format, config, model_spec, head_name, output_labels):
        output_keys = [key for key in relevant if _qkv_names(model_rules, key) & {"head.linear.weight", "head.linear.bias"}]
        qkv_tensors = {name: tensor for name, tensor in qkv_tensors.items() if not name.startswith("head.linear.")}
        unexpected_keys += tuple(output_keys)
    return ConvertedCheckpoint(model_spec, qkv_tensors, unexpected_keys)


def _needs_new_output_layer(hf_format: HFFormat, config: HFConfig, model_spec: spec.Model, head: str, labels: Sequence[str]) -> bool:
    """Whether the file's last layer was trained for other outputs than those that are asked for."""
    if model_spec.head is None or model_spec.head.kind not in ("sequence", "token", "span", "choice"):
        return False
    declared = hf_format.architectures.get(_declared_architectures(hf_format, config)[0])
    return declared is None or declared.head != head or (bool(model_spec.head.labels) and len(labels) != len(labels_from_hf_config(config)))


def _qkv_names(rules: Sequence[Rule], key: str) -> set[str]:
    rule, placeholders = find_rule(rules, key) or (Drop(key), {})
    return {name.format(**placeholders) for name in rule.qkv_names} if isinstance(rule, TensorRule) else set()


def write_checkpoint(folder: Path, model: spec.Model, tensors: Mapping[str, Tensor]) -> None:
    """Writes config.json and model.safetensors as transformers reads them."""
    config, hf_tensors = to_hf_checkpoint(model, tensors)
    atomic_write_text(folder / CONFIG_FILE, _dump_json(config))
    save_tensors(folder / WEIGHTS_FILE, hf_tensors, {"format": "pt"})


def to_hf_checkpoint(model: spec.Model, tensors: Mapping[str, Tensor]) -> tuple[HFConfig, dict[str, Tensor]]:
    """A model's config and its tensors under their names."""
    if model.lora is not None:
        raise InputError("this model has adapters, which Hugging Face's format lacks; merge them (qkv export --merge)")
    if model.feature_layers != "last":
        reason = "and Hugging Face has no form for that; save it as 'qkv' (qkv import does)"
        raise InputError(f"this model's head reads {model.feature_layers} of its layers, {reason}")
    family = _require_hf_family(model)
    hf_format: HFFormat = family.HUGGING_FACE
    config, architecture_name = hf_config_from_spec(family, model)
    architecture = hf_format.architectures[architecture_name]
    hf_tensors = to_hf(hf_format.rules(architecture.head, model), tensors)
    if architecture.no_prefix:
        hf_tensors = {key.removeprefix(hf_format.prefix): tensor for key, tensor in hf_tensors.items()}
    return config, hf_tensors


def hf_config_text(model: spec.Model) -> str:
    """What config.json says of a model."""
    return _dump_json(hf_config_from_spec(_require_hf_family(model), model)[0])


def _dump_json(config: HFConfig) -> str:
    return json.dumps(config, indent=2) + "\n"


def _require_hf_family(model: spec.Model) -> ModuleType:
    family = families.get_family(model.family)
    if not hasattr(family, "HUGGING_FACE"):
        raise InputError(f"the family '{model.family}' has no Hugging Face form; save it as 'qkv' (qkv import does)")
    return family


def head_names(family: ModuleType) -> list[str]:
    """The heads that a family has, in the order of its table."""
    hf_format: HFFormat = family.HUGGING_FACE
    return list(dict.fromkeys(architecture.head for architecture in hf_format.architectures.values()))


def read_json(path: Path) -> HFConfig:
    """An object out of a JSON file; anything else is refused by name."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); is this a checkpoint folder?") from None
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise InputError(f"{path}: not JSON; restore it from where the checkpoint came from") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds no JSON object; restore it from where the checkpoint came from")
    return content


def _declared_head(hf_format: HFFormat, config: HFConfig, location: str) -> str:
    declared = _declared_architectures(hf_format, config)
    if len(declared) != 1 or declared[0] not in hf_format.architectures:
        raise InputError(f"{location}: architectures says '{declared[0]}'; {did_you_mean(declared[0], hf_format.architectures)}")
    return hf_format.architectures[declared[0]].head


def _declared_architectures(hf_format: HFFormat, config: HFConfig) -> list[str]:
    """Their classes that a config.json names; where it names none, the family's body."""
    backbone_classes = [name for name, architecture in hf_format.architectures.items() if architecture.head in ("pooler", "body")]
    declared = config.get("architectures") or backbone_classes
    return [str(name) for name in declared] if isinstance(declared, list) else [str(declared)]


def _canonical_keys(hf_format: HFFormat, tensors: Mapping[str, Tensor], model_rules: Sequence[Rule]) -> dict[str, Tensor]:
    """Their keys as the rules spell them: with the body's prefix, in today's words, the first of tied names there."""
    rules = (*model_rules, *hf_format.all_rules())
    canonical: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        stem, dot, leaf = key.rpartition(".")
        current = f"{stem}{dot}{_LEGACY_NAMES.get(leaf, leaf)}"
        candidates = [current, hf_format.prefix + current]
        name = next((name for name in candidates if find_rule(rules, name)), key)
        if name in canonical:
            raise InputError(f"the checkpoint holds '{name}' under two names; nothing was loaded")
        canonical[name] = tensor
    for key in list(canonical):
        rule, placeholders = find_rule(rules, key) or (Drop(key), {})
        if isinstance(rule, Tie | ExportDuplicate) and rule.duplicate_of.format(**placeholders) not in canonical:
            canonical[rule.duplicate_of.format(**placeholders)] = canonical.pop(key)
    return canonical


# ---- files ----------------------------------------------------------------------------------------------------------


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, mapped rather than read where the file is a safetensors one."""
    weights_path = next((folder / name for name in _WEIGHTS_FILES if (folder / name).is_file()), None)
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
                raise InputError(f"{weights_path.parent / shard}: lacks '{name}', which {weights_path.name} says it holds")
        tensors |= shard_tensors
    return tensors


def _read_shard_index(index: Path) -> dict[str, list[str]]:
    weight_map: Any = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: has no weight_map; restore it from where the checkpoint came from")
    shards: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if Path(str(shard)).name != shard:
            raise InputError(f"{index}: '{shard}' is no file beside it")
        shards.setdefault(shard, []).append(name)
    return shards


def _read_file(path: Path) -> dict[str, Tensor]:
    return load_pickle(path) if path.suffix == ".bin" else load_tensors(path)[0]
