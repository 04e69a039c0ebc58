"""Conversion between Hugging Face checkpoints and our models, in memory: configs and tensors, no files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from qkv import families, spec
from qkv.errors import InputError, did_you_mean, quote
from qkv.families.hf.format import (
    HFConfig,
    HFFormat,
    hf_config_from_spec,
    labels_from_hf_config,
    spec_from_hf_config,
)
from qkv.families.hf.rules import Drop, ExportDuplicate, Rule, TensorRule, Tie, find_rule, match_pattern

_LEGACY_NAMES = {"gamma": "weight", "beta": "bias"}  # LayerNorm parameters in checkpoints converted from TensorFlow
_OUTPUT_LAYER = {"head.linear.weight", "head.linear.bias"}


class ConvertedCheckpoint(NamedTuple):
    """A checkpoint in our terms."""

    spec: spec.Model
    tensors: dict[str, Tensor]  # under our names
    unexpected_keys: tuple[str, ...]  # Hugging Face keys that this model does not use, such as those of another head


def convert_checkpoint(
    config: HFConfig,
    hf_tensors: Mapping[str, Tensor],
    folder: str,
    head: str | None = None,
    labels: Sequence[str] | None = None,
) -> ConvertedCheckpoint:
    """Convert a config.json and its tensors to our spec and names.

    Args:
        config: the content of config.json.
        hf_tensors: the tensors under their Hugging Face names.
        folder: the checkpoint folder, for messages.
        head: the head to use; None: the one that `architectures` names.
        labels: the names of the head's outputs; None: those of the config.
    """
    location = f"{folder}/config.json"
    family = families.by_model_type(config.get("model_type"), location)
    hf_format: HFFormat = family.HF_FORMAT
    head_name = head or _declared_head(hf_format, config, location)
    max_labels = max((tensor.shape[0] for tensor in hf_tensors.values() if tensor.dim()), default=0)
    config_labels = labels_from_hf_config(config, max_labels)
    output_labels = tuple(labels) if labels else config_labels
    config = hf_format.infer_from_weights(config, hf_tensors)
    model_spec = spec_from_hf_config(family, config, location, head_name, output_labels)
    tensors = canonical_keys(hf_format, hf_tensors, hf_format.rules(head_name, model_spec))
    if (
        head is None
        and head_name == "pooler"
        and not any(find_rule(hf_format.head_rules["pooler"], key) for key in tensors)
    ):
        head_name, model_spec = "backbone", spec_from_hf_config(family, config, location, "backbone", output_labels)
    model_rules, all_rules = hf_format.rules(head_name, model_spec), hf_format.all_rules()
    relevant = {
        key: tensor for key, tensor in tensors.items() if find_rule(model_rules, key) or not find_rule(all_rules, key)
    }
    unexpected_keys = tuple(key for key in tensors if key not in relevant)
    qkv_tensors = from_hf(model_rules, relevant, folder)
    if head is not None and _needs_new_output_layer(
        hf_format, config, model_spec, head_name, len(output_labels) != len(config_labels)
    ):
        unexpected_keys += tuple(key for key in relevant if _qkv_names(model_rules, key) & _OUTPUT_LAYER)
        qkv_tensors = {name: tensor for name, tensor in qkv_tensors.items() if not name.startswith("head.linear.")}
    return ConvertedCheckpoint(model_spec, qkv_tensors, unexpected_keys)


def _needs_new_output_layer(
    hf_format: HFFormat, config: HFConfig, model_spec: spec.Model, head: str, labels_differ: bool
) -> bool:
    """Return whether the checkpoint's output layer was trained for other outputs than the requested ones."""
    if model_spec.head is None or model_spec.head.kind not in ("sequence", "token", "span", "choice"):
        return False
    declared = hf_format.architectures.get(_declared_architectures(hf_format, config)[0])
    if declared is None or declared.head != head:
        return True
    return bool(model_spec.head.labels) and labels_differ


def _qkv_names(rules: Sequence[Rule], key: str) -> set[str]:
    rule, placeholders = find_rule(rules, key) or (Drop(key), {})
    return {name.format(**placeholders) for name in rule.qkv_names} if isinstance(rule, TensorRule) else set()


def to_hf_checkpoint(model: spec.Model, tensors: Mapping[str, Tensor]) -> tuple[HFConfig, dict[str, Tensor]]:
    """Return a model's config.json and its tensors under their Hugging Face names."""
    if model.lora is not None:
        raise InputError(
            "this model has LoRA weights, which a Hugging Face checkpoint lacks; merge them (qkv export --merge-lora)"
        )
    if model.feature_layers != "last":
        reason = "which no Hugging Face class does; save it as 'qkv' (qkv import does)"
        raise InputError(f"this model's head reads the features {model.feature_layers}, {reason}")
    family = _require_hf_family(model)
    hf_format: HFFormat = family.HF_FORMAT
    config, architecture_name = hf_config_from_spec(family, model)
    architecture = hf_format.architectures[architecture_name]
    hf_tensors = to_hf(hf_format.rules(architecture.head, model), tensors)
    if architecture.no_prefix:
        hf_tensors = {key.removeprefix(hf_format.prefix): tensor for key, tensor in hf_tensors.items()}
    return config, hf_tensors


def has_hf_form(model: spec.Model) -> bool:
    """Return whether a class of transformers computes what this model does."""
    try:
        to_hf_config(model)
    except InputError:
        return False
    return True


def to_hf_config(model: spec.Model) -> HFConfig:
    """Return a model's config.json."""
    return hf_config_from_spec(_require_hf_family(model), model)[0]


def _require_hf_family(model: spec.Model) -> ModuleType:
    family = families.get_family(model.family)
    if not hasattr(family, "HF_FORMAT"):
        raise InputError(f"the family '{model.family}' has no Hugging Face form; save it as 'qkv' (qkv import does)")
    return family


def _declared_head(hf_format: HFFormat, config: HFConfig, location: str) -> str:
    declared = _declared_architectures(hf_format, config)
    if len(declared) != 1 or declared[0] not in hf_format.architectures:
        raise InputError(
            f"{location}: architectures is {quote(declared[0])}; "
            f"{did_you_mean(declared[0][:60], hf_format.architectures)}"
        )
    return hf_format.architectures[declared[0]].head


def _declared_architectures(hf_format: HFFormat, config: HFConfig) -> list[str]:
    """Return the classes that a config.json names; if it names none, the family's backbone class."""
    backbone_classes = [
        name for name, architecture in hf_format.architectures.items() if architecture.head in ("pooler", "backbone")
    ]
    declared = config.get("architectures") or backbone_classes
    return [str(name) for name in declared] if isinstance(declared, list) else [str(declared)]


def canonical_keys(
    hf_format: HFFormat, tensors: Mapping[str, Tensor], model_rules: Sequence[Rule]
) -> dict[str, Tensor]:
    """Return the tensors with their keys as the rules spell them: with the prefix, without legacy and tied names."""
    rules = (*model_rules, *hf_format.all_rules())
    canonical: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        stem, dot, leaf = key.rpartition(".")
        current = f"{stem}{dot}{_LEGACY_NAMES.get(leaf, leaf)}"
        candidates = [current, hf_format.prefix + current]
        name = next((name for name in candidates if find_rule(rules, name)), key)
        if name in canonical:
            raise InputError(f"the checkpoint holds {quote(name, 100)} under two names; nothing was loaded")
        canonical[name] = tensor
    for key in list(canonical):
        rule, placeholders = find_rule(rules, key) or (Drop(key), {})
        if isinstance(rule, Tie | ExportDuplicate) and rule.duplicate_of.format(**placeholders) not in canonical:
            canonical[rule.duplicate_of.format(**placeholders)] = canonical.pop(key)
    return canonical


# ---- rules applied to tensors ---------------------------------------------------------------------------------------


def from_hf(rules: Sequence[Rule], tensors: Mapping[str, Tensor], location: str) -> dict[str, Tensor]:
    """Return Hugging Face tensors under our names, without copying; a key that matches no rule is refused."""
    qkv_tensors: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        matched = find_rule(rules, key)
        if matched is None:
            raise InputError(
                f"{location}: holds {quote(key, 100)}, which no rule of this family takes; nothing was loaded"
            )
        rule, placeholders = matched
        if isinstance(rule, Tie):
            _check_tie(tensors, key, rule.duplicate_of.format(**placeholders), location)
        elif isinstance(rule, TensorRule):
            _apply_rule(qkv_tensors, rule, placeholders, key, tensor, location)
    return qkv_tensors


def _apply_rule(
    qkv_tensors: dict[str, Tensor],
    rule: TensorRule,
    placeholders: dict[str, str],
    key: str,
    tensor: Tensor,
    location: str,
) -> None:
    try:
        converted = rule.from_hf(tensor)
    except InputError as error:
        raise InputError(f"{location}: {quote(key, 100)}: {error}") from None
    for name, converted_tensor in zip(rule.qkv_names, converted, strict=True):
        qkv_name = name.format(**placeholders)
        if qkv_name in qkv_tensors:
            raise InputError(f"{location}: {quote(key, 100)} is a second source for '{qkv_name}'; nothing was loaded")
        qkv_tensors[qkv_name] = converted_tensor


def _check_tie(tensors: Mapping[str, Tensor], key: str, duplicate_of: str, location: str) -> None:
    if duplicate_of in tensors and not torch.equal(tensors[key], tensors[duplicate_of]):
        raise InputError(
            f"{location}: {quote(key, 100)} and '{duplicate_of}' are one tensor in this model, and differ here"
        )


def to_hf(rules: Sequence[Rule], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our tensors under their Hugging Face names (the inverse of `from_hf`), without tied and dropped ones."""
    hf_tensors: dict[str, Tensor] = {}
    used: set[str] = set()
    for rule, placeholders in _matching_rules(rules, tensors):
        names = [name.format(**placeholders) for name in rule.qkv_names]
        missing = [name for name in names if name not in tensors]
        if missing:
            raise InputError(f"the model has '{names[0]}' but no '{missing[0]}'; it cannot be exported")
        hf_tensors[rule.hf.format(**placeholders)] = rule.to_hf([tensors[name] for name in names])
        used.update(names)
    for duplicate in rules:
        if isinstance(duplicate, ExportDuplicate) and duplicate.duplicate_of in hf_tensors:
            # cloned: safetensors refuses two names of one memory
            hf_tensors[duplicate.hf] = hf_tensors[duplicate.duplicate_of].clone()
    unmatched = [name for name in tensors if name not in used]
    if unmatched:
        raise InputError(f"'{unmatched[0]}' has no name in this family's Hugging Face form")
    return hf_tensors


def _matching_rules(
    rules: Sequence[Rule], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[TensorRule, dict[str, str]]]:
    for rule in rules:
        if not isinstance(rule, TensorRule):
            continue
        for name in tensors:
            placeholders = match_pattern(rule.qkv_names[0], name)
            if placeholders is not None:
                yield rule, placeholders
