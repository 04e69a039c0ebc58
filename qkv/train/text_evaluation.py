"""Perplexity of text under a language model, with the objective of its run or that of its architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from qkv.checkpoints import ModelBundle
from qkv.errors import InputError
from qkv.nn.two_stream import TwoStreamEncoder
from qkv.recipe.parse import parse_recipe
from qkv.recipe.schema import PretrainingRecipe
from qkv.train.workloads.pretraining import PretrainingWorkload
from qkv.train.workloads.pretraining_data import Chunker, load_training_corpus, load_validation_corpus


def evaluate_text(
    bundle: ModelBundle,
    recipe: PretrainingRecipe | None,
    path: str | Path | None = None,
    format: str | None = None,
    split: str | None = None,
    columns: Mapping[str, Any] | None = None,
    memory_length: int | None = None,
) -> dict[str, float]:
    """Return the perplexity of the predicted tokens, the mean losses and the number of tokens.

    Args:
        bundle: the model with its tokenizer.
        recipe: the recipe of its run, which defines the objective; None: next tokens of a decoder, masked tokens of
            an encoder, with the settings of the papers.
        path: file or folder of documents; None: a split of the recipe.
        format: format of the file; None: by its name, else that of the recipe, else the file is one document.
        split: "valid", the held-out text, or "train"; None: "valid".
        columns: {"text": the field of the text} in JSON lines and Parquet.
        memory_length: tokens of the memory of a model with memory; None: as in the recipe.
    """
    if bundle.source_tokenizer is None:
        raise InputError("this model has no tokenizer, which evaluation on text needs; give the folder of a run")
    if split == "test" or (split is not None and path is not None):
        raise InputError("split: text has the splits valid (held out) and train of a recipe; leave it out, or --data")
    unknown = sorted(set(columns or {}) - {"text"})
    if unknown:
        raise InputError(f"columns: documents have no column '{unknown[0]}'; name the field of the text (text)")
    if recipe is None:
        recipe = _default_recipe(bundle, path)
    changes: dict[str, Any] = {"streaming": False}
    training_recipe = replace(recipe, data=replace(recipe.data, **changes))
    if path is not None:
        changes |= {"valid": str(path), "format": format or recipe.data.format}  # the reader refuses unknown formats
    if columns:
        changes["text_field"] = columns["text"]
    validation = replace(recipe.validation, max_tokens=2**62)  # all of the text
    if memory_length is not None:
        if not bundle.model.has_memory or recipe.data.carry_memory is False:
            raise InputError("memory_length: this model is evaluated without memory; leave it out")
        validation = replace(validation, memory_length=memory_length)
    recipe = replace(recipe, data=replace(recipe.data, **changes), validation=validation)
    chunker = Chunker(recipe, bundle.source_tokenizer, bundle.model.spec)
    if split == "train":
        corpus = cast(Any, load_training_corpus(recipe, chunker)[0])  # not a stream
    else:
        corpus = load_validation_corpus(recipe, bundle.source_tokenizer)
    workload = PretrainingWorkload(recipe, chunker, corpus, "", corpus)
    if workload.updates_in_place and split != "train":  # word2vec draws noise words as often as they occur in training
        workload = replace(workload, train_corpus=cast(Any, load_training_corpus(training_recipe, chunker)[0]))
    workload.check_validation_data()
    return workload.evaluate(bundle.model) | {"tokens": float(corpus.tokens)}


def _default_recipe(bundle: ModelBundle, path: str | Path | None) -> PretrainingRecipe:
    """Return a recipe for a checkpoint without one: the objective of its architecture."""
    if path is None:
        raise InputError("this model has no recipe with held-out text; give a text file (--data FILE)")
    objective = "mlm" if bundle.model.spec.decoder is None else "clm"
    if isinstance(bundle.model, TwoStreamEncoder):
        objective = "plm"
    raw = {
        "name": "evaluation",
        "objective": objective,
        "model": {"init_from": "none"},
        # a text file is one document unless its name or the user says otherwise
        "data": {"train": str(path), "valid": str(path), "format": "file_per_document"},
        "train": {"max_steps": 1, "batch_tokens": 4096, "learning_rate": 1e-3},
    }
    recipe = parse_recipe(raw, "the evaluation")
    assert isinstance(recipe, PretrainingRecipe)  # it has an objective
    return recipe
