"""The model and the sequence lengths of a recipe or a run, for `qkv.cost`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qkv import spec
from qkv.checkpoints.hub import resolve
from qkv.checkpoints.model_folder import read_spec
from qkv.errors import InputError
from qkv.recipe.parse import RECIPE_FILE, read_recipe, read_run_recipe
from qkv.recipe.schema import BaseRecipe
from qkv.train.workload import workload_class

_DEFAULT_LENGTH = 32  # tokens of a sequence if there is no data to measure


@dataclass(frozen=True)
class CostInputs:
    """Arguments of `qkv.cost`."""

    spec: spec.Model
    """The model."""
    source_length: int
    """Tokens of a source sequence; 0 without an encoder."""
    target_length: int
    """Tokens of a target sequence; 0 without a decoder."""
    recipe: BaseRecipe | None
    """The recipe with the size of a batch and the number of steps; None for a checkpoint without one."""
    memory_length: int = 0
    """Tokens of preceding segments that self-attention reads in training."""
    num_streams: int | None = None
    """Sequences per step; None: as the recipe's `train` section has it."""

    def batch_tokens(self, length: int) -> int | None:
        """Return the tokens per step of sequences of a length; None without a recipe."""
        if self.recipe is None:
            return None
        return self.num_streams * length if self.num_streams else self.recipe.train.tokens_per_step(length)


def infer_cost_inputs(path: Path, overrides: Sequence[str], vocab_sizes: str | None) -> CostInputs:
    """Return the cost inputs of a recipe file or a model folder.

    Args:
        path: a recipe file, a run folder or a checkpoint folder.
        overrides: `key=value` changes of a recipe.
        vocab_sizes: source and target vocabulary sizes of a recipe, such as "30,40"; None: as in its data.
    """
    if path.is_dir():
        return _from_folder(path, overrides)
    recipe = read_recipe(path, list(overrides))
    if "init_from" in recipe.model:
        return _from_folder(resolve(recipe.model["init_from"]), [])
    size_pair = None if vocab_sizes is None else _parse_vocab_sizes(vocab_sizes)
    return workload_class(recipe).cost_inputs(recipe, path, None, size_pair)


def _from_folder(folder: Path, overrides: Sequence[str]) -> CostInputs:
    if overrides:
        raise InputError(f"{folder} is a trained model; key=value changes go with a recipe")
    model_spec = read_spec(folder)
    if not (folder / RECIPE_FILE).is_file():
        return with_default_lengths(model_spec, None)
    recipe = read_run_recipe(folder / RECIPE_FILE)
    return workload_class(recipe).cost_inputs(recipe, folder, model_spec, None)


def with_default_lengths(model_spec: spec.Model, recipe: BaseRecipe | None) -> CostInputs:
    """Return cost inputs with short sequences, or with the number of patches of an image."""
    embedding = model_spec.source_embedding
    if embedding is not None and embedding.fixed_length is not None:
        return CostInputs(model_spec, embedding.fixed_length, 0, recipe)
    return with_lengths_up_to(model_spec, _DEFAULT_LENGTH, recipe)


def with_lengths_up_to(model_spec: spec.Model, length: int | None, recipe: BaseRecipe | None) -> CostInputs:
    """Return cost inputs with sequences of `length`, or of the model's maximum if that is less."""
    source_length, target_length = (
        min(length or embedding.max_length, embedding.max_length) if embedding else 0
        for embedding in (model_spec.source_embedding, model_spec.target_embedding)
    )
    return CostInputs(model_spec, source_length, target_length, recipe)


def _parse_vocab_sizes(vocab_sizes: str) -> tuple[int, int]:
    try:
        sizes = [int(size) for size in vocab_sizes.split(",")]
        source, target = sizes * 2 if len(sizes) == 1 else sizes  # one size is that of both sides
    except ValueError:
        raise InputError(f"--vocab-size takes one size, or two such as 30,40, not '{vocab_sizes}'") from None
    if min(source, target) < 1:
        raise InputError(f"--vocab-size takes sizes of at least 1, not '{vocab_sizes}'")
    return source, target
