"""The model that a recipe starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from qkv import spec
from qkv.checkpoints.model_folder import ModelBundle, load, load_state, unique_state_dict
from qkv.errors import InputError
from qkv.nn.model import build_on_meta
from qkv.recipe.parse import DROPOUT_KEYS
from qkv.recipe.schema import BaseRecipe, FinetuneRecipe, PretrainingRecipe, TokenizerSection


def load_initial_model(recipe: BaseRecipe, head: str | None = None, labels: Sequence[str] | None = None) -> ModelBundle:
    """What `model.init_from` names, with the recipe's dropout: that is how it is trained, not what it is."""
    if isinstance(recipe, FinetuneRecipe | PretrainingRecipe) and recipe.tokenizer != TokenizerSection():
        raise InputError("tokenizer: a model that is there has its tokeniser; leave out this section, or model.init_from")
    init_from = str(recipe.model["init_from"])
    bundle = load(init_from, head=head, labels=labels)
    spec_with_dropout = spec.with_dropout(bundle.model.spec, *(recipe.model.get(key) for key in DROPOUT_KEYS))
    if spec_with_dropout == bundle.model.spec:
        return bundle
    model = build_on_meta(spec_with_dropout)
    load_state(model, unique_state_dict(bundle.model), init_from, assign=True)
    return dataclasses.replace(bundle, model=model.eval())
