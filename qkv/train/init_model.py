"""The pretrained model that a recipe starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from qkv import spec
from qkv.checkpoints import ModelBundle, load
from qkv.checkpoints.state import load_state, unique_state_dict
from qkv.errors import InputError
from qkv.nn.model import build_on_meta
from qkv.recipe.model_section import DROPOUT_KEYS
from qkv.recipe.schema import BaseRecipe


def load_initial_model(recipe: BaseRecipe, head: str | None = None, labels: Sequence[str] | None = None) -> ModelBundle:
    """Load the model of `model.init_from` with the recipe's dropout.

    Args:
        recipe: a recipe with `model.init_from`.
        head: the head to put on the backbone; None: the one it was saved with.
        labels: the names of the head's outputs.
    """
    if recipe.has_tokenizer_section:
        raise InputError("tokenizer: a pretrained model has its own; leave out this section, or model.init_from")
    init_from = str(recipe.model["init_from"])
    bundle = load(init_from, head=head, labels=labels)
    spec_with_dropout = spec.with_dropout(bundle.model.spec, *(recipe.model.get(key) for key in DROPOUT_KEYS))
    if spec_with_dropout == bundle.model.spec:
        return bundle
    model = build_on_meta(spec_with_dropout)
    load_state(model, unique_state_dict(bundle.model), init_from, assign=True)
    return dataclasses.replace(bundle, model=model.eval())
