"""A family's Hugging Face format as data: its config.json in both directions, its classes, its weight rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_type_hints

from qkv import spec
from qkv.errors import InputError, describe_value, did_you_mean, quote
from qkv.families.heads import pooling_name
from qkv.families.hf.rules import HeadMatrix, Rule
from qkv.spec.check import check_model, check_value

if TYPE_CHECKING:
    from torch import Tensor

HFConfig = dict[str, Any]

ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


@dataclass(frozen=True)
class ConfigKey:
    """One value of config.json and its place in our config and spec."""

    hf_key: str  # key in config.json
    config_field: str  # field of the family's Config, or keyword argument of its `make_spec`
    spec_path: str  # dotted path in the spec
    value_map: Mapping[Any, Any] | None = None  # Hugging Face value -> our value; None: they are equal
    heads: tuple[str, ...] = ()  # heads whose spec has this value; empty: all
    none_value: Any = None  # value of the config field that is None in the spec; None: such a field is left out


@dataclass(frozen=True)
class Architecture:
    """One model class of transformers."""

    head: str  # our name of its head
    no_prefix: bool = False  # its backbone's parameter names lack the prefix


@dataclass(frozen=True)
class WhenSpec:
    """Rules that apply only if the spec has a certain value: the names of the tensors depend on it."""

    spec_path: str  # dotted path in the spec
    equals: Any  # the value
    rules: tuple[Rule, ...]  # the rules that then apply


def _unchanged(config: HFConfig) -> HFConfig:
    return config


def _infer_nothing(config: HFConfig, _: Mapping[str, Tensor]) -> HFConfig:
    return config


@dataclass(frozen=True, kw_only=True)
class HFFormat:
    """The tables that convert a family's checkpoints, in both directions."""

    model_type: str
    """`model_type` in config.json."""
    prefix: str
    """Prefix of the backbone's parameter names in a model with a head; the rules are written with it."""
    architectures: Mapping[str, Architecture]
    """The classes of transformers by name."""
    config_keys: tuple[ConfigKey, ...]
    """The keys of config.json that are read and written."""
    backbone_rules: tuple[Rule, ...]
    """The weight rules of everything but the head."""
    head_rules: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    """The weight rules of each head, by our name of the head."""
    untied_head_rules: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    """The weight rules of heads whose output matrix is not the embedding's, if they differ from `head_rules`."""
    conditional_rules: tuple[WhenSpec, ...] = ()
    """Further backbone rules, which depend on the spec."""
    supported_values: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json of which only one value is supported."""
    infer_from_weights: Callable[[HFConfig, Mapping[str, Tensor]], HFConfig] = _infer_nothing
    """Add to the config what only the tensors reveal."""
    from_hf_config: Callable[[HFConfig], HFConfig] = _unchanged
    """Change config.json so that `config_keys` apply."""
    to_hf_config: Callable[[HFConfig], HFConfig] = _unchanged
    """Invert `from_hf_config`."""

    def rules(self, head: str, model: spec.Model) -> tuple[Rule, ...]:
        """Return the rules of a model with this head."""
        head_rules = self.head_rules.get(head, ())
        if head in self.untied_head_rules and model.head is not None and not model.head.tie_embeddings:
            head_rules = self.untied_head_rules[head]
        conditional = (when for when in self.conditional_rules if _get_path(model, when.spec_path) == when.equals)
        rules = (*self.backbone_rules, *head_rules, *(rule for when in conditional for rule in when.rules))
        stack = model.encoder if model.decoder is None else model.decoder
        num_heads = stack.block.self_attention.heads if isinstance(stack, spec.TransformerStack) else 1
        return tuple(replace(rule, num_heads=num_heads) if isinstance(rule, HeadMatrix) else rule for rule in rules)

    def all_rules(self) -> tuple[Rule, ...]:
        """Return the rules of all heads: of everything that a checkpoint of this family may hold."""
        tables = (self.head_rules, self.untied_head_rules)
        head_rules = (rule for table in tables for rules in table.values() for rule in rules)
        conditional = (rule for when in self.conditional_rules for rule in when.rules)
        return (*self.backbone_rules, *head_rules, *conditional)


def spec_from_hf_config(
    family: ModuleType, config: HFConfig, location: str, head: str, labels: tuple[str, ...]
) -> spec.Model:
    """Return the spec of a config.json with a head; an unsupported value is refused by name."""
    hf_format: HFFormat = family.HF_FORMAT
    config = hf_format.from_hf_config(dict(config))
    for key, value in hf_format.supported_values.items():
        if config.get(key, value) not in (value, None):
            raise InputError(
                f"{location}: {key} is {describe_value(config[key])}; "
                f"qkv supports only {value!r} for {hf_format.model_type}"
            )
    for key in _UNSUPPORTED_KEYS:
        if config.get(key):
            raise InputError(f"{location}: {key} is {describe_value(config[key])}, which qkv does not support")
    values: dict[str, Any] = {}
    types = _field_types(family)
    for config_key in hf_format.config_keys:
        if config.get(config_key.hf_key) is not None:
            name, value = config_key.config_field, _to_qkv_value(config_key, config[config_key.hf_key], location)
            if name in types:
                check_value(name, types[name], value, f"{location}: {config_key.hf_key}")
            values[name] = value
    try:
        model_spec = _make_spec(family, values, head, labels)
        check_model(model_spec)
    except InputError as error:
        raise InputError(f"{location}: {_in_hf_terms(str(error), hf_format)}") from None
    return _apply_usage(model_spec, config)


# keys of any family that change the computation and that no family here supports
_UNSUPPORTED_KEYS = ("quantization_config", "pruned_heads")


def _field_types(family: ModuleType) -> dict[str, Any]:
    """Return the types of a family's config fields and of the arguments of its `make_spec`."""
    return get_type_hints(family.make_spec) | get_type_hints(family.Config)


def _in_hf_terms(message: str, hf_format: HFFormat) -> str:
    """Return an error message about the spec with the field of config.json in front that it begins with."""
    path = message.split(":")[0].split(" ")[0]
    hf_key = next((key.hf_key for key in hf_format.config_keys if key.spec_path == path), None)
    return message if hf_key is None or hf_key == path else f"{hf_key}: {message}"


def _make_spec(family: ModuleType, values: dict[str, Any], head: str, labels: tuple[str, ...]) -> spec.Model:
    config_fields = {f.name for f in fields(family.Config)}
    config = family.Config(**{name: value for name, value in values.items() if name in config_fields})
    spec_kwargs = {name: value for name, value in values.items() if name not in config_fields}
    model_spec: spec.Model = family.make_spec(config, head=head, labels=labels, **spec_kwargs)
    return model_spec


def _to_qkv_value(config_key: ConfigKey, value: Any, location: str) -> Any:
    if config_key.value_map is None:
        return value
    hf_values = [str(name) for name in config_key.value_map]
    if not isinstance(value, str | int | bool) or value not in config_key.value_map:
        hint = did_you_mean(str(value)[:60], hf_values)
        raise InputError(f"{location}: {config_key.hf_key} {quote(value)} is unknown; {hint}")
    return config_key.value_map[value]


def hf_config_from_spec(family: ModuleType, model: spec.Model) -> tuple[HFConfig, str]:
    """Return the config.json of a spec and the class of transformers for its head.

    A spec that the family's table cannot reproduce is refused.
    """
    hf_format: HFFormat = family.HF_FORMAT
    labels = model.head.labels if model.head is not None else ()
    comparable = model
    if model.head is not None:
        comparable = replace(model, head=replace(model.head, multi_label=False, subword_pooling="first"))
    mismatches: list[str] = []
    for name, architecture in hf_format.architectures.items():
        # a backbone is saved under the class with a pooler and read without it, since the pooler's weights are missing
        head = "backbone" if model.head is None and architecture.head == "pooler" else architecture.head
        config, values = _config_of(hf_format, model, head)
        saved = _make_spec(family, values, head, labels)
        if saved == comparable:
            hf_config = hf_format.to_hf_config(config | dict(hf_format.supported_values))
            return _add_metadata(hf_config, hf_format, name, labels) | _usage_of(model), name
        mismatches.append(_first_mismatch(comparable, saved))
    if model.head is not None and not model.head.is_token_level and pooling_name(model.head) in ("mean", "attention"):
        reason = f"its head pools all tokens ({pooling_name(model.head)}), and transformers has no such"
        remedy = "save it as 'qkv' (qkv import does), or train it with finetune.pooling=first"
        raise InputError(f"{reason} {hf_format.model_type}; {remedy}")
    # the class of another head differs in the head at least, so that a mismatch elsewhere is the reason
    reason = next((mismatch for mismatch in mismatches if not mismatch.startswith("head")), mismatches[0])
    remedy = f"save it as 'qkv' (qkv import does); config.json of {hf_format.model_type} has no such value"
    raise InputError(f"this model is no plain {hf_format.model_type}: its {reason}; {remedy}")


def _first_mismatch(model: Any, saved: Any, path: str = "") -> str:
    """Describe the first field of a spec that differs from the one that its config.json gives."""
    if is_dataclass(model) and type(model) is type(saved):
        for spec_field in fields(model):
            value, saved_value = getattr(model, spec_field.name), getattr(saved, spec_field.name)
            if value != saved_value:
                return _first_mismatch(value, saved_value, f"{path}.{spec_field.name}".lstrip("."))
    brief = [type(v).__name__ if is_dataclass(v) else quote(v).strip("'") for v in (model, saved)]
    return f"{path} is {brief[0]}, not {brief[1]}"


_PROBLEM_TYPE_KEY, _MULTI_LABEL = "problem_type", "multi_label_classification"
_SUBWORD_POOLING_KEY = "qkv_word"  # a key of ours: transformers leaves the pooling of subwords to the caller


def _apply_usage(model: spec.Model, config: HFConfig) -> spec.Model:
    """Set the fields of the head that determine how its logits are interpreted."""
    head = model.head
    if head is not None and head.kind == "sequence" and config.get(_PROBLEM_TYPE_KEY) == _MULTI_LABEL:
        return replace(model, head=replace(head, multi_label=True))
    if head is not None and head.kind == "token" and config.get(_SUBWORD_POOLING_KEY) == "mean":
        return replace(model, head=replace(head, subword_pooling="mean"))
    return model


def _usage_of(model: spec.Model) -> HFConfig:
    """Return the config keys of the head's interpretation: the inverse of `_apply_usage`."""
    if model.head is not None and model.head.multi_label:
        return {_PROBLEM_TYPE_KEY: _MULTI_LABEL}
    return {_SUBWORD_POOLING_KEY: "mean"} if model.head is not None and model.head.subword_pooling == "mean" else {}


def _config_of(hf_format: HFFormat, model: spec.Model, head: str) -> tuple[HFConfig, dict[str, Any]]:
    """Return the values of the spec under their Hugging Face keys and under our config fields."""
    config: HFConfig = {}
    values: dict[str, Any] = {}
    for config_key in hf_format.config_keys:
        value = _get_path(model, config_key.spec_path)
        value = config_key.none_value if value is None else value
        if value is not None and (not config_key.heads or head in config_key.heads):
            values[config_key.config_field] = value
            config[config_key.hf_key] = value if config_key.value_map is None else _to_hf_value(config_key, value)
    return config, values


def _get_path(model: spec.Model, spec_path: str) -> Any:
    value: Any = model
    for name in spec_path.split("."):
        value = getattr(value, name, None)
    return value


def _to_hf_value(config_key: ConfigKey, value: Any) -> Any:
    assert config_key.value_map is not None
    for hf_value, qkv_value in config_key.value_map.items():
        if qkv_value == value:
            return hf_value
    raise InputError(f"{config_key.config_field} {value!r} has no name in Hugging Face's {config_key.hf_key}")


def _add_metadata(config: HFConfig, hf_format: HFFormat, architecture: str, labels: tuple[str, ...]) -> HFConfig:
    full_config: HFConfig = {
        "architectures": [architecture],
        "model_type": hf_format.model_type,
        "dtype": "float32",
    } | config
    if labels:  # else theirs are two
        full_config["id2label"] = {str(index): label for index, label in enumerate(labels)}
        full_config["label2id"] = {label: index for index, label in enumerate(labels)}
    return full_config


_DEFAULT_LABELS = 2


def labels_from_hf_config(config: HFConfig, max_labels: int) -> tuple[str, ...]:
    """Return the labels of a classifier; two default names if the config has none.

    Args:
        config: the content of config.json.
        max_labels: the most outputs that a tensor of the checkpoint has.
    """
    id2label = config.get("id2label")
    if isinstance(id2label, dict) and id2label:
        if sorted(id2label, key=str) != sorted(map(str, range(len(id2label)))):
            raise InputError(f"config.json: id2label should number its labels 0 to {len(id2label) - 1}")
        return tuple(str(id2label[str(index)]) for index in range(len(id2label)))
    num_labels = config.get("num_labels", config.get("_num_labels"))
    if num_labels is None:
        return tuple(f"LABEL_{index}" for index in range(_DEFAULT_LABELS))
    check_value("num_outputs", int, num_labels, "config.json: num_labels")
    if num_labels > max(max_labels, _DEFAULT_LABELS):
        raise InputError(f"config.json: num_labels is {num_labels}, and no tensor has more than {max_labels} rows")
    return tuple(f"LABEL_{index}" for index in range(num_labels))
