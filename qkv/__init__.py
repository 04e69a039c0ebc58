"""qkv: attention, from the scored average over an RNN's states to the Transformer, and everything built on it.

import qkv
for record in qkv.fit(qkv.read_recipe("recipes/g2p-demo.yaml"), "runs/g2p-demo"):
    print(record)
model = qkv.load("runs/g2p-demo")
qkv.predict(model, ["attention"])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from qkv import families
    from qkv.data.readers import read_pairs
    from qkv.decode import Decoding, embed, generate, predict, score
    from qkv.errors import InputError
    from qkv.evaluate import evaluate
    from qkv.look.alignment import plot_alignments
    from qkv.look.capture import capture
    from qkv.look.cost import cost
    from qkv.look.words import alignments
    from qkv.nn import Ragged, build
    from qkv.train import fit, read_recipe
    from qkv.weights import Loaded, load, save

_HOMES = {
    "Decoding": "qkv.decode",
    "InputError": "qkv.errors",
    "Loaded": "qkv.weights",
    "Ragged": "qkv.nn",
    "alignments": "qkv.look.words",
    "build": "qkv.nn",
    "capture": "qkv.look.capture",
    "cost": "qkv.look.cost",
    "embed": "qkv.decode",
    "evaluate": "qkv.evaluate",
    "fit": "qkv.train",
    "generate": "qkv.decode",
    "load": "qkv.weights",
    "plot_alignments": "qkv.look.alignment",
    "predict": "qkv.decode",
    "read_pairs": "qkv.data.readers",
    "read_recipe": "qkv.train",
    "save": "qkv.weights",
    "score": "qkv.decode",
}

__all__ = [
    "Decoding",
    "InputError",
    "Loaded",
    "Ragged",
    "alignments",
    "build",
    "capture",
    "cost",
    "embed",
    "evaluate",
    "families",
    "fit",
    "generate",
    "load",
    "plot_alignments",
    "predict",
    "read_pairs",
    "read_recipe",
    "save",
    "score",
]


def __getattr__(name: str) -> Any:
    """Loads a name's home when it is first used, so that `import qkv` costs next to nothing."""
    if name == "families":  # a package with its own few names
        return importlib.import_module("qkv.families")
    if name not in _HOMES:
        raise AttributeError(f"module 'qkv' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # the next use finds it at once
    return value
