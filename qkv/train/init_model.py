"""The pretrained model, or the word vectors, that a recipe starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from qkv import spec
from qkv.checkpoints import ModelBundle, load
from qkv.checkpoints.model_folder import is_finished
from qkv.checkpoints.state import load_state, unique_state_dict
from qkv.checkpoints.unfinished_run import has_checkpoint
from qkv.checkpoints.word_vectors import InitialVectors
from qkv.errors import InputError
from qkv.nn.construction import build_on_meta
from qkv.recipe.model_section import DROPOUT_KEYS
from qkv.recipe.schema import BaseRecipe
from qkv.tokenization.tokenizer import Tokenizer


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


def load_initial_vectors(
    recipe: BaseRecipe, folder: Path, tokenizer: Tokenizer, model_spec: spec.Model
) -> InitialVectors | None:
    """Read the vectors of `model.embeddings` for the tokens of a model's input; None if the recipe names no file.

    A run that is resumed has them in its weights already.
    """
    path = recipe.model.get("embeddings")
    if path is None or has_checkpoint(folder) or is_finished(folder):
        return None
    return InitialVectors.read(str(path), tokenizer, spec.input_embedding(model_spec).d_model)
