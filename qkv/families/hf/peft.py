"""Conversion between LoRA adapters in PEFT's format and our models, in memory: configs and tensors, no files.

PEFT names an adapted layer by its path in the transformers model and stores `lora_A` [r, in] and `lora_B` [out, r]
next to it, and layers that were trained in full, such as a new head, under their own names. A layer that holds several
of ours (GPT-2's `c_attn`) has one A; ours then have equal ones. The other way round, several of our A are stacked and
the B are the blocks of a matrix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from qkv import families, spec
from qkv.errors import InputError, quote
from qkv.families.hf.convert import ConvertedCheckpoint, canonical_keys, convert_checkpoint, from_hf, to_hf
from qkv.families.hf.format import HFConfig, HFFormat, hf_config_from_spec
from qkv.families.hf.peft_config import HEAD_BY_TASK_TYPE, AdapterConfig
from qkv.families.hf.rules import HeadMatrix, Rule, Split, TensorRule, Tie, Transpose, find_rule, match_pattern
from qkv.nn.lora import TARGET_MODULES

_PREFIX = "base_model.model."
_OUR_LAYER = re.compile(r"(?:encoder|decoder)\.blocks\.[0-9]+\.(?:self_attention|cross_attention|feedforward)\.(\w+)")
_MIN_MAX_RANK = 256  # a higher rank than this and than the width of the model is a damaged file


class LoraPair(NamedTuple):
    """The two matrices of one adapted layer."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r]


# ---- import ---------------------------------------------------------------------------------------------------------


def convert_adapter(
    adapter: AdapterConfig,
    adapter_tensors: Mapping[str, Tensor],
    base_config: HFConfig,
    base_tensors: Mapping[str, Tensor],
    folder: str,
    labels: Sequence[str] | None = None,
) -> tuple[ConvertedCheckpoint, tuple[str, ...]]:
    """Convert an adapter and its base model to our spec and names.

    Args:
        adapter: the adapter's config.
        adapter_tensors: the adapter's tensors under PEFT's names.
        base_config: the content of the base model's config.json.
        base_tensors: the base model's tensors under their Hugging Face names.
        folder: the adapter's folder, for messages.
        labels: the names of the head's outputs, if there are as many.

    Returns:
        The model with LoRA weights, and the names of adapted layers that ours cannot adapt, whose update was merged.
    """
    family = families.by_model_type(base_config.get("model_type"), f"{folder}: the base model")
    hf_format: HFFormat = family.HF_FORMAT
    pairs, replaced = _split_adapter(adapter_tensors, folder)
    head = adapter.head or _matching_head(hf_format, replaced)
    outputs = _num_outputs(hf_format, head, replaced)
    if outputs is not None and (labels is None or len(labels) != outputs):
        id2label = base_config.get("id2label")
        keeps_names = isinstance(id2label, dict) and len(id2label) == outputs
        labels = None if keeps_names else [f"LABEL_{index}" for index in range(outputs)]
    base = convert_checkpoint(base_config, base_tensors, folder, head, labels)
    rules = hf_format.rules(head or _head_name(hf_format, base.spec), base.spec)
    tensors = base.tensors | from_hf(rules, canonical_keys(hf_format, replaced, rules), folder)
    updates, merged = _our_updates(adapter, pairs, hf_format, rules, tensors, base.spec, folder)
    lora = _add_lora(adapter, updates, tensors, base.spec, folder)
    return ConvertedCheckpoint(replace(base.spec, lora=lora), tensors, base.unexpected_keys), merged


def _split_adapter(tensors: Mapping[str, Tensor], folder: str) -> tuple[dict[str, LoraPair], dict[str, Tensor]]:
    """Return the pairs of matrices by the name of their layer, and the tensors that replace the base model's."""
    matrices: dict[tuple[str, str], Tensor] = {}
    replaced: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = re.sub(r"\.(base_layer|modules_to_save(\.default)?)\.", ".", key.removeprefix(_PREFIX))
        matrix = re.fullmatch(r"(.+)\.lora_(embedding_)?([AB])(\.default)?(\.weight)?", name)
        if not tensor.is_floating_point():
            raise InputError(f"{folder}: {quote(key)} holds {tensor.dtype}; weights are floating-point numbers")
        if not key.startswith(_PREFIX) or (matrix is None and ".lora_" in name):
            raise InputError(f"{folder}: holds {quote(key)}, which is no tensor of a plain LoRA adapter")
        if matrix is None and ".original_module." not in name:  # that is what a saved module has replaced
            replaced[name] = tensor
        elif matrix is not None:
            # an embedding's update is transposed: A is [r, vocabulary]
            module = f"{matrix[1]}{':transposed' if matrix[2] else ''}"
            matrices[module, matrix[3]] = tensor.float()
    pairs: dict[str, LoraPair] = {}
    for module, side in matrices:
        a, b = matrices.get((module, "A")), matrices.get((module, "B"))
        if a is None or b is None or a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
            raise InputError(f"{folder}: lora_{side} of {quote(module)} has no lora_A and lora_B that fit together")
        pairs[module] = LoraPair(a, b)
    if not pairs:
        raise InputError(f"{folder}: the adapter has no LoRA weights")
    return pairs, replaced


def _matching_head(hf_format: HFFormat, replaced: Mapping[str, Tensor]) -> str | None:
    """Return the first head whose layers an adapter without a task type replaces; None: the base model's head."""
    for head, rules in hf_format.head_rules.items():
        if any(name in _names(rules, key) for key in replaced for name in ("head.linear.weight",)):
            return head
    return None


def _num_outputs(hf_format: HFFormat, head: str | None, replaced: Mapping[str, Tensor]) -> int | None:
    rules = hf_format.head_rules.get(head or "", ())
    rows = (tensor for key, tensor in replaced.items() if "head.linear.weight" in _names(rules, key) and tensor.dim())
    return next((tensor.shape[0] for tensor in rows), None) if head in ("sequence", "token") else None


def _names(rules: Sequence[Rule], key: str) -> tuple[str, ...]:
    """Return our names of a Hugging Face tensor; empty if no rule takes it."""
    rule, placeholders = find_rule(rules, key) or (None, {})
    return tuple(name.format(**placeholders) for name in rule.qkv_names) if isinstance(rule, TensorRule) else ()


def _head_name(hf_format: HFFormat, model: spec.Model) -> str:
    """Return the name of the head that a converted checkpoint has."""
    architecture = hf_config_from_spec(families.get_family(model.family), model)[1]
    return "backbone" if model.head is None else hf_format.architectures[architecture].head


def _our_updates(
    adapter: AdapterConfig,
    pairs: Mapping[str, LoraPair],
    hf_format: HFFormat,
    rules: Sequence[Rule],
    tensors: dict[str, Tensor],
    model: spec.Model,
    folder: str,
) -> tuple[dict[str, LoraPair], tuple[str, ...]]:
    """Return the updates by the name of our layer, scaled as the config's first scaling factor requires.

    Updates of layers that ours cannot adapt are merged into their weights; their names are returned too.
    """
    default_scaling = adapter.scaling("", adapter.rank)
    updates: dict[str, LoraPair] = {}
    merged: list[str] = []
    for module, (a, b) in pairs.items():
        name, _, transposed = module.partition(":")
        (key,) = canonical_keys(hf_format, {f"{name}.weight": a}, rules)
        ours = [qkv_name.removesuffix(".weight") for qkv_name in _names(rules, key)]
        if not ours or b.shape[0] % len(ours) or any(f"{layer}.weight" not in tensors for layer in ours):
            raise InputError(f"{folder}: adapts {quote(name)}, which the base model does not have in this shape")
        factor = adapter.scaling(name, a.shape[0]) / default_scaling
        scaled_b = b if factor == 1 else b * factor
        for layer, block in zip(ours, scaled_b.chunk(len(ours)), strict=True):
            _check_shape(tensors[f"{layer}.weight"], a, block, bool(transposed), f"{folder}: {quote(name)}")
            match = _OUR_LAYER.fullmatch(layer)
            if match is not None and match[1] in TARGET_MODULES and not transposed:
                updates[layer] = LoraPair(a.clone() if len(ours) > 1 else a, block.contiguous())
                continue
            if transposed and (model.share_embeddings or (model.head is not None and model.head.tie_embeddings)):
                reason = f"adapts {quote(name)}, whose matrix other layers of this model use unchanged"
                raise InputError(f"{folder}: {reason}; merge the adapter with PEFT")
            delta = block @ a * default_scaling
            tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"].float() + (delta.t() if transposed else delta)
            merged.append(name)
    return updates, tuple(merged)


def _check_shape(weight: Tensor, a: Tensor, b: Tensor, transposed: bool, location: str) -> None:
    shape = (a.shape[1], b.shape[0]) if transposed else (b.shape[0], a.shape[1])
    if weight.shape != shape:
        raise InputError(f"{location}: its update is {list(shape)}, and the base model has {list(weight.shape)}")


def _add_lora(
    adapter: AdapterConfig,
    updates: Mapping[str, LoraPair],
    tensors: dict[str, Tensor],
    model: spec.Model,
    folder: str,
) -> spec.LoraConfig | None:
    """Add the updates to the tensors of a model, with zeros where a layer has less than the others, or none."""
    if not updates:
        return None
    rank = max(pair.a.shape[0] for pair in updates.values())
    if rank > max(_MIN_MAX_RANK, spec.input_embedding(model).d_model):
        raise InputError(f"{folder}: a rank of {rank} is higher than the width of the model")
    targets = {layer.rpartition(".")[2] for layer in updates}
    for layer in [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]:
        match = _OUR_LAYER.fullmatch(layer)
        if match is None or match[1] not in targets:
            continue
        out_features, in_features = tensors[f"{layer}.weight"].shape
        a, b = updates.get(layer) or LoraPair(torch.zeros(0, in_features), torch.zeros(out_features, 0))
        missing = rank - a.shape[0]
        tensors[f"{layer}.lora_A"] = torch.cat([a, a.new_zeros(missing, in_features)]) if missing else a
        tensors[f"{layer}.lora_B"] = torch.cat([b, b.new_zeros(out_features, missing)], 1) if missing else b
    return spec.LoraConfig(
        rank=rank,
        alpha=adapter.scaling("", adapter.rank) * rank,
        dropout=adapter.dropout,
        target_modules=tuple(name for name in TARGET_MODULES if name in targets),
    )


# ---- export ---------------------------------------------------------------------------------------------------------


def to_peft(model: spec.Model, tensors: Mapping[str, Tensor], base: str) -> tuple[HFConfig, dict[str, Tensor]]:
    """Return the adapter_config.json and the tensors, under PEFT's names, of a model with LoRA weights.

    Args:
        model: the spec, with `lora` set.
        tensors: all tensors of the model under our names.
        base: the name or the path of the base model in Hugging Face's format.
    """
    if model.lora is None:
        raise InputError("this model has no LoRA weights; leave out --adapter")
    family = families.get_family(model.family)
    if not hasattr(family, "HF_FORMAT"):
        raise InputError(f"the family '{model.family}' has no Hugging Face form, and so no PEFT adapter")
    hf_format: HFFormat = family.HF_FORMAT
    architecture = hf_format.architectures[hf_config_from_spec(family, replace(model, lora=None))[1]]
    rules = hf_format.rules(architecture.head, model)
    prefix = hf_format.prefix if architecture.no_prefix else ""
    adapter_tensors, saved_modules = _head_tensors(model, hf_format, rules, tensors)
    config: HFConfig = {
        "peft_type": "LORA",
        "task_type": next((task for task, head in HEAD_BY_TASK_TYPE.items() if head == architecture.head), None),
        "base_model_name_or_path": base,
        "r": model.lora.rank,
        "lora_alpha": _plain_number(model.lora.alpha),
        "lora_dropout": model.lora.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": saved_modules or None,
    }
    modules: list[str] = []
    for rule, hf_module, layers in _adapted_layers(rules, tensors):
        module = hf_module.removeprefix(prefix)
        if isinstance(rule, HeadMatrix):
            reason = f"PEFT cannot adapt the attention of this {model.family}, whose projections are no layers there"
            raise InputError(f"{reason}; export the merged model (qkv export --merge-lora)")
        pair, num_stacked = _stack([_lora_pair(tensors, layer) for layer in layers], tensors, layers)
        config["fan_in_fan_out"] |= isinstance(rule, Transpose) or (isinstance(rule, Split) and rule.transposed)
        if num_stacked > 1:  # the rank is larger, and the scaling factor must stay
            pattern = ".".join(module.split(".")[-2:])
            config["rank_pattern"][pattern] = num_stacked * model.lora.rank
            config["alpha_pattern"][pattern] = _plain_number(num_stacked * model.lora.alpha)
        adapter_tensors |= {f"{module}.lora_A.weight": pair.a, f"{module}.lora_B.weight": pair.b}
        modules.append(module)
    config["target_modules"] = modules
    return config, {f"{_PREFIX}{name.removeprefix(prefix)}": tensor for name, tensor in adapter_tensors.items()}


def _plain_number(value: float) -> float:
    return int(value) if value == int(value) else value


def _adapted_layers(
    rules: Sequence[Rule], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[TensorRule, str, list[str]]]:
    """Yield the rule, the Hugging Face name and our names of every layer with LoRA weights."""
    yielded: set[str] = set()
    for name in tensors:
        if not name.endswith(".lora_A"):
            continue
        weight = f"{name.removesuffix('lora_A')}weight"
        for rule in (rule for rule in rules if isinstance(rule, TensorRule)):
            found = (match_pattern(pattern, weight) for pattern in rule.qkv_names)
            placeholders = next((match for match in found if match is not None), None)
            if placeholders is None:
                continue
            key = rule.hf.format(**placeholders)
            if key not in yielded:
                yielded.add(key)
                layers = [pattern.format(**placeholders).removesuffix(".weight") for pattern in rule.qkv_names]
                yield rule, _module_name(rules, key).removesuffix(".weight"), layers
            break


def _module_name(rules: Sequence[Rule], key: str) -> str:
    """Return the name of a tensor in a model in memory, which a few families spell otherwise than their files."""
    for rule in rules:
        placeholders = match_pattern(rule.duplicate_of, key) if isinstance(rule, Tie) else None
        if isinstance(rule, Tie) and placeholders is not None:
            return rule.hf.format(**placeholders)
    return key


def _lora_pair(tensors: Mapping[str, Tensor], layer: str) -> LoraPair | None:
    a, b = tensors.get(f"{layer}.lora_A"), tensors.get(f"{layer}.lora_B")
    return None if a is None or b is None else LoraPair(a, b)


def _stack(
    pairs: Sequence[LoraPair | None], tensors: Mapping[str, Tensor], layers: Sequence[str]
) -> tuple[LoraPair, int]:
    """Return the pair of a layer that holds several of ours, and the number of ours that are adapted."""
    present = [pair for pair in pairs if pair is not None]
    if len(pairs) == 1:
        return present[0], 1
    columns: list[Tensor] = []  # of B: each block is in the rows of its layer
    offset, num_rows = 0, [tensors[f"{layer}.weight"].shape[0] for layer in layers]
    for pair, rows in zip(pairs, num_rows, strict=True):
        if pair is not None:
            column = pair.b.new_zeros(sum(num_rows), pair.b.shape[1])
            column[offset : offset + rows] = pair.b
            columns.append(column)
        offset += rows
    return LoraPair(torch.cat([pair.a for pair in present]), torch.cat(columns, 1)), len(present)


def _head_tensors(
    model: spec.Model, hf_format: HFFormat, rules: Sequence[Rule], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the head's tensors under their Hugging Face names, and the names of the modules that hold them."""
    ours = {
        name: tensor
        for name, tensor in tensors.items()
        if name.split(".")[0] in ("head", "aux_head") and name != "head.final_logits_bias"  # that is no parameter
    }
    if not ours:
        return {}, []
    if model.head is not None and model.head.kind == "lm" and set(ours) != {"head.linear.weight"}:
        raise InputError("PEFT cannot store this language model head apart from its embedding; use --merge-lora")
    hf_tensors = to_hf(rules, ours)
    components = (key.removeprefix(hf_format.prefix).split(".")[0] for key in hf_tensors)
    return hf_tensors, list(dict.fromkeys(components))
