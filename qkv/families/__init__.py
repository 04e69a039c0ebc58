"""Model families: one module per family, with presets, a spec, Hugging Face tables and a tokenizer template.

A family is a module (or any object) with `PAPER`, `Config` (a dataclass of the recipe's `model` section), `PRESETS`
(name -> Config) and `make_spec(config, …)`. `HF_FORMAT` and `TOKENIZER_TEMPLATE` are optional. Families import no torch
and are imported when they are first looked up. `qkv.register.family` adds one from outside the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import ModuleType

from qkv.errors import InputError, check_type, describe_value, did_you_mean, quote
from qkv.foreign_names import family_hint
from qkv.registry import Registry
from qkv.tokenization.template import Template

_MODULES = (
    "awd_lstm",
    "bart",
    "bert",
    "bow",
    "elmo",
    "gpt",
    "gpt2",
    "lstm_lm",
    "marian",
    "rnn",
    "roberta",
    "t5",
    "transformer",
    "transformer_xl",
    "vit",
    "word2vec",
    "xlnet",
)

FAMILIES: Registry[ModuleType] = Registry("family", {name: f"qkv.families.{name}" for name in _MODULES})

# `model_type` in a config.json -> family, so that looking one up imports no other family
_FAMILY_BY_MODEL_TYPE = {
    "bart": "bart",
    "bert": "bert",
    "gpt2": "gpt2",
    "marian": "marian",
    "openai-gpt": "gpt",
    "roberta": "roberta",
    "t5": "t5",
    "transfo-xl": "transformer_xl",
    "vit": "vit",
    "xlnet": "xlnet",
}


def names() -> list[str]:
    """Return the names of all families, built-in and registered, in alphabetical order."""
    return sorted(FAMILIES.names())


def get_family(name: str) -> ModuleType:
    """Return a family by its name."""
    check_type(name, str, "model.family", "the name of a family")
    if name not in FAMILIES:
        hint = family_hint(name)
        if hint is not None:
            raise InputError(f"model.family: '{name}' {hint}")
        raise InputError(f"model.family: no family {quote(name)}; {did_you_mean(name[:60], names())}")
    return FAMILIES.get(name)


def by_model_type(model_type: object, location: str) -> ModuleType:
    """Return the family of a `model_type` in a Hugging Face config.json."""
    if not isinstance(model_type, str):
        raise InputError(f"{location}: model_type cannot be {describe_value(model_type)}; it names an architecture")
    name = _FAMILY_BY_MODEL_TYPE.get(model_type)
    if name is not None:
        return FAMILIES.get(name)
    registered = {family.HF_FORMAT.model_type: family for family in _registered() if hasattr(family, "HF_FORMAT")}
    if model_type not in registered:
        foreign = family_hint(model_type)
        if foreign is not None:
            raise InputError(f"{location}: model_type '{model_type}' {foreign}")
        hint = did_you_mean(model_type[:60], [*_FAMILY_BY_MODEL_TYPE, *registered])
        raise InputError(f"{location}: qkv has no family for model_type {quote(model_type)}; {hint}")
    return registered[model_type]


def _registered() -> Iterator[ModuleType]:
    """Yield the families from outside the package; they are imported already."""
    return (FAMILIES.get(name) for name in FAMILIES.names() if name not in _MODULES)


def head_names(family: ModuleType) -> list[str]:
    """Return the names of the heads that a family has, its own first."""
    if hasattr(family, "HF_FORMAT"):
        return list(dict.fromkeys(architecture.head for architecture in family.HF_FORMAT.architectures.values()))
    return list(getattr(family, "HEAD_NAMES", ()))


class TokenizerTemplates(Iterable[Template]):
    """The distinct tokenizer templates of all families; iterating over them imports the families."""

    def __iter__(self) -> Iterator[Template]:
        yielded: list[Template] = []
        for family in map(get_family, names()):
            template = getattr(family, "TOKENIZER_TEMPLATE", None)
            if template is not None and template not in yielded:
                yielded.append(template)
                yield template


def tokenizer_templates() -> TokenizerTemplates:
    """Return the distinct tokenizer templates of all families, imported only when iterated over."""
    return TokenizerTemplates()
