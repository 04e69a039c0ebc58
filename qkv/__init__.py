"""qkv: attention models, from RNNs with attention to the Transformer families, for training, inference and analysis.

    import qkv

    for record in qkv.fit("recipes/g2p-demo.yaml", "runs/g2p-demo"):  # or a mapping, and a data frame as data
        print(record)
    bundle = qkv.load("runs/g2p-demo")
    qkv.predict(bundle, ["attention"])
    qkv.attention(bundle, ["attention"])[0]["cross.0"]

Public names are imported when they are first used, so `import qkv` imports no torch. `docs/api.md` has examples.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from qkv import families as families
    from qkv import register as register
    from qkv.analysis.alignments import alignments as alignments
    from qkv.analysis.attention import attention as attention
    from qkv.analysis.cost import cost as cost
    from qkv.analysis.plot import plot_alignments as plot_alignments
    from qkv.checkpoints import ModelBundle as ModelBundle
    from qkv.checkpoints import load as load
    from qkv.checkpoints import save as save
    from qkv.checkpoints.embed import embed as embed
    from qkv.errors import InputError as InputError
    from qkv.generation import GenerationConfig as GenerationConfig
    from qkv.nn import Ragged as Ragged
    from qkv.nn import build as build
    from qkv.recipe import read_recipe as read_recipe
    from qkv.tasks.predictor import Predictor as Predictor
    from qkv.tasks.predictor import predict as predict
    from qkv.tasks.predictor import stream as stream
    from qkv.train.evaluation import evaluate as evaluate
    from qkv.train.fit import fit as fit

# name -> module that defines it; a submodule of qkv is its own definition
_PUBLIC = {
    "GenerationConfig": "qkv.generation",
    "InputError": "qkv.errors",
    "ModelBundle": "qkv.checkpoints",
    "Predictor": "qkv.tasks.predictor",
    "Ragged": "qkv.nn",
    "alignments": "qkv.analysis.alignments",
    "attention": "qkv.analysis.attention",
    "build": "qkv.nn",
    "cost": "qkv.analysis.cost",
    "embed": "qkv.checkpoints.embed",
    "evaluate": "qkv.train.evaluation",
    "families": "qkv.families",
    "fit": "qkv.train.fit",
    "load": "qkv.checkpoints",
    "plot_alignments": "qkv.analysis.plot",
    "predict": "qkv.tasks.predictor",
    "read_recipe": "qkv.recipe",
    "register": "qkv.register",
    "save": "qkv.checkpoints",
    "stream": "qkv.tasks.predictor",
}

__all__ = [
    "GenerationConfig",
    "InputError",
    "ModelBundle",
    "Predictor",
    "Ragged",
    "alignments",
    "attention",
    "build",
    "cost",
    "embed",
    "evaluate",
    "families",
    "fit",
    "load",
    "plot_alignments",
    "predict",
    "read_recipe",
    "register",
    "save",
    "stream",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'qkv' has no attribute '{name}'")
    module = importlib.import_module(_PUBLIC[name])
    value = module if _PUBLIC[name] == f"qkv.{name}" else getattr(module, name)
    globals()[name] = value  # later uses do not come here
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
