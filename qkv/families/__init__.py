"""One file a family: the paper, a table of sizes, a function from a shape to a spec, a table of weight rules.

A family registers by being a module here; nothing else in the package knows its name.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from qkv.errors import InputError, did_you_mean
from qkv.tokenization.template import Template


def names() -> list[str]:
    """The families that there are."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def get_family(name: str) -> ModuleType:
    """A family's module: `SIZES` (name -> Shape), `Shape`, `spec(shape, vocabularies …)`."""
    if name not in names():
        raise InputError(f"model.family: no family '{name}'; {did_you_mean(name, names())}")
    return importlib.import_module(f"{__name__}.{name}")


def tokenizer_templates() -> tuple[Template, ...]:
    """The input templates of the families that read text, each once."""
    unique_templates: list[Template] = []
    for module in map(get_family, names()):
        if hasattr(module, "TEMPLATE") and module.TEMPLATE not in unique_templates:
            unique_templates.append(module.TEMPLATE)
    return tuple(unique_templates)


def by_model_type(model_type: str, location: str) -> ModuleType:
    """The family that Hugging Face calls `model_type` in a config.json."""
    families_by_type = {f.HUGGING_FACE.model_type: f for f in map(get_family, names()) if hasattr(f, "HUGGING_FACE")}
    if model_type not in families_by_type:
        raise InputError(f"{location}: qkv has no family for model_type '{model_type}'; {did_you_mean(model_type, families_by_type)}")
    return families_by_type[model_type]
