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
    from qkv.analysis.alignments import alignments
    from qkv.analysis.capture import capture_attention
    from qkv.analysis.cost import cost
    from qkv.analysis.plot import plot_alignments
    from qkv.checkpoints import ModelBundle, load, save
    from qkv.data.formats.pair_readers import read_pairs
    from qkv.errors import InputError
    from qkv.generation import GenerationConfig, embed, generate, predict, token_log_probs
    from qkv.metrics import evaluate
    from qkv.nn import Ragged, build
    from qkv.recipe import read_recipe
    from qkv.train.trainer import fit

_LAZY_EXPORTS = {
    "GenerationConfig": "qkv.generation",
    "InputError": "qkv.errors",
    "ModelBundle": "qkv.checkpoints",
    "Ragged": "qkv.nn",
    "alignments": "qkv.analysis.alignments",
    "build": "qkv.nn",
    "capture_attention": "qkv.analysis.capture",
    "cost": "qkv.analysis.cost",
    "embed": "qkv.generation",
    "evaluate": "qkv.metrics",
    "fit": "qkv.train.trainer",
    "generate": "qkv.generation",
    "load": "qkv.checkpoints",
    "plot_alignments": "qkv.analysis.plot",
    "predict": "qkv.generation",
    "read_pairs": "qkv.data.formats.pair_readers",
    "read_recipe": "qkv.recipe",
    "save": "qkv.checkpoints",
    "token_log_probs": "qkv.generation",
}

__all__ = [
    "GenerationConfig",
    "InputError",
    "ModelBundle",
    "Ragged",
    "alignments",
    "build",
    "capture_attention",
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
    "token_log_probs",
]


def __getattr__(name: str) -> Any:
    """Loads a name's home when it is first used, so that `import qkv` costs next to nothing."""
    if name == "families":  # a package with its own few names
        return importlib.import_module("qkv.families")
    if name not in _LAZY_EXPORTS:
        raise AttributeError(f"module 'qkv' has no attribute '{name}'")
    value = getattr(importlib.import_module(_LAZY_EXPORTS[name]), name)
    globals()[name] = value  # the next use finds it at once
    return value
