"""One file a family: the paper, a table of sizes, a function from a shape to a spec, a table of weight rules.

A family registers by being a module here; nothing else in the package knows its name.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from qkv.errors import InputError, nearest
from qkv.text.template import Template


def names() -> list[str]:
    """The families that there are."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def family(name: str) -> ModuleType:
    """A family's module: `SIZES` (name -> Shape), `Shape`, `spec(shape, vocabularies …)`."""
    if name not in names():
        raise InputError(f"model.family: no family '{name}'; {nearest(name, names())}")
    return importlib.import_module(f"{__name__}.{name}")


def templates() -> tuple[Template, ...]:
    """The input templates of the families that read text, each once."""
    found: list[Template] = []
    for one in map(family, names()):
        if hasattr(one, "TEMPLATE") and one.TEMPLATE not in found:
            found.append(one.TEMPLATE)
    return tuple(found)


def of_model_type(model_type: str, where: str) -> ModuleType:
    """The family that Hugging Face calls `model_type` in a config.json."""
    known = {f.HUGGING_FACE.model_type: f for f in map(family, names()) if hasattr(f, "HUGGING_FACE")}
    if model_type not in known:
        raise InputError(f"{where}: qkv has no family for model_type '{model_type}'; {nearest(model_type, known)}")
    return known[model_type]
