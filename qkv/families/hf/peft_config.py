"""The adapter_config.json of a LoRA adapter in PEFT's format, validated. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from qkv.errors import InputError, describe_value, quote
from qkv.families.hf.format import HFConfig
from qkv.spec.check import check_value

HEAD_BY_TASK_TYPE = {
    "SEQ_CLS": "sequence",
    "TOKEN_CLS": "token",
    "QUESTION_ANS": "span",
    "CAUSAL_LM": "lm",
    "SEQ_2_SEQ_LM": "seq2seq_lm",
    "FEATURE_EXTRACTION": "backbone",
}
# keys of adapter_config.json that change the computation in a way that we do not have
_UNSUPPORTED_KEYS = (
    *("use_dora", "lora_bias", "layer_replication", "trainable_token_indices", "target_parameters"),
    *("alora_invocation_tokens", "megatron_config", "use_qalora", "use_bdlora", "kasa_config", "arrow_config"),
    *("monteclora_config", "velora_config"),
)
_PLAIN_INITS = ("gaussian", "orthogonal", "eva")  # others change the weights of the base model


@dataclass(frozen=True)
class AdapterConfig:
    """The values of adapter_config.json that matter here."""

    base: str | None  # name or path of the base model
    head: str | None  # our name of the head; None: the base model's
    alpha: float  # numerator of the scaling factor
    rank: int  # its denominator, for layers without another rank
    dropout: float  # dropout on the input of A
    use_rslora: bool  # divide by the square root of the rank instead
    alpha_pattern: Mapping[str, float]  # other numerators, by the end of a layer's name

    def scaling(self, module: str, rank: int) -> float:
        """Return the factor on the update of a layer."""
        alpha = next((alpha for end, alpha in self.alpha_pattern.items() if _ends_with(module, end)), self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _ends_with(module: str, end: str) -> bool:
    """Return whether a dotted name ends with another one; `^` in front of it stands for the beginning."""
    return module == end.removeprefix("^") or (not end.startswith("^") and module.endswith(f".{end}"))


def parse_adapter_config(raw: HFConfig, location: str) -> AdapterConfig:
    """Validate the content of adapter_config.json; what we cannot compute is refused by name."""
    if raw.get("peft_type") != "LORA":
        kind = describe_value(raw.get("peft_type"))
        raise InputError(f"{location}: peft_type is {kind}; qkv reads LORA adapters only")
    for key in _UNSUPPORTED_KEYS:
        if raw.get(key):
            raise InputError(f"{location}: {key} is {describe_value(raw[key])}, which qkv does not support")
    init = raw.get("init_lora_weights")
    if init is not None and not isinstance(init, bool) and init not in _PLAIN_INITS:
        reason = f"init_lora_weights is {describe_value(init)}, which changes the base model"
        raise InputError(f"{location}: {reason}; convert the adapter with PEFT")
    check_value("rank", int, raw.get("r", 8), f"{location}: r")
    check_value("dropout", float, raw.get("lora_dropout") or 0.0, f"{location}: lora_dropout")
    check_value("use_rslora", bool, raw.get("use_rslora") or False, f"{location}: use_rslora")
    patterns = raw.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or not all(re.fullmatch(r"\^?[\w.-]+", key) for key in patterns):
        raise InputError(f"{location}: alpha_pattern must map names of layers to numbers; qkv reads no expressions")
    for key, alpha in [("lora_alpha", raw.get("lora_alpha", 8)), *patterns.items()]:
        check_value("alpha", float, alpha, f"{location}: {key}")
        if alpha <= 0:
            raise InputError(f"{location}: {key} cannot be {alpha}: it must be positive")
    task_type, base = raw.get("task_type"), raw.get("base_model_name_or_path")
    if task_type is not None and (not isinstance(task_type, str) or task_type not in HEAD_BY_TASK_TYPE):
        raise InputError(f"{location}: task_type {quote(task_type)} is unknown; known: {', '.join(HEAD_BY_TASK_TYPE)}")
    if base is not None and not isinstance(base, str):
        raise InputError(f"{location}: base_model_name_or_path cannot be {describe_value(base)}")
    return AdapterConfig(
        base=base,
        head=None if task_type is None else HEAD_BY_TASK_TYPE[task_type],
        alpha=float(raw.get("lora_alpha", 8)),
        rank=raw.get("r", 8),
        dropout=float(raw.get("lora_dropout") or 0.0),
        use_rslora=raw.get("use_rslora") or False,
        alpha_pattern=patterns,
    )
