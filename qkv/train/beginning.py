"""The model that a recipe starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from qkv import spec
from qkv.errors import InputError
from qkv.nn.model import hollow
from qkv.train.recipe import DROPOUT
from qkv.train.sections import Recipe, TaskRecipe, TextRecipe, Vocabulary
from qkv.weights.folder import Loaded, fill, load, state


def begun(recipe: Recipe, head: str | None = None, labels: Sequence[str] | None = None) -> Loaded:
    """What `model.from` names, with the recipe's dropout: that is how it is trained, not what it is."""
    if isinstance(recipe, TaskRecipe | TextRecipe) and recipe.text != Vocabulary():
        raise InputError("text: a model that is there has its tokeniser; leave out this section, or model.from")
    where = str(recipe.model["from"])
    loaded = load(where, head=head, labels=labels)
    changed = spec.dropping(loaded.model.spec, *(recipe.model.get(key) for key in DROPOUT))
    if changed == loaded.model.spec:
        return loaded
    model = hollow(changed)
    fill(model, state(loaded.model), where, assign=True)
    return dataclasses.replace(loaded, model=model.eval())
