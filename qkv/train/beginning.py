"""The model that a recipe starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from qkv import spec
from qkv.nn import build
from qkv.train.recipe import DROPOUT
from qkv.train.sections import Recipe
from qkv.weights.folder import Loaded, load


def begun(recipe: Recipe, head: str | None = None, labels: Sequence[str] | None = None) -> Loaded:
    """What `model.from` names, with the recipe's dropout: that is how it is trained, not what it is."""
    loaded = load(str(recipe.model["from"]), head=head, labels=labels)
    changed = spec.dropping(loaded.model.spec, *(recipe.model.get(key) for key in DROPOUT))
    if changed == loaded.model.spec:
        return loaded
    model = build(changed)
    model.load_state_dict(loaded.model.state_dict())
    return dataclasses.replace(loaded, model=model)
