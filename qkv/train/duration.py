"""How long a run is. A recipe may say it in epochs and shares; the loop counts steps."""

from __future__ import annotations

from dataclasses import replace

from qkv.recipe.schema import FinetuneRecipe, Recipe, TrainConfig
from qkv.train.workload import Workload


def resolve_steps(recipe: Recipe, workload: Workload) -> Recipe:
    """The recipe with all its durations as numbers of steps; what is written down stays as the user said it."""
    from qkv.train.workloads.finetuning import (
        FinetuneWorkload,  # brings the tasks with it, which others need not wait for
    )

    train_config = recipe.train
    if not isinstance(recipe, FinetuneRecipe) or not isinstance(workload, FinetuneWorkload):
        assert train_config.max_steps is not None  # epochs of others are refused as the recipe is read
        return replace(recipe, train=_resolve(train_config, train_config.max_steps))
    steps_per_epoch = workload.batches_per_epoch()
    max_steps = max(1, round((train_config.epochs or 0) * steps_per_epoch)) if train_config.max_steps is None else train_config.max_steps
    validation = replace(recipe.validation, every_steps=recipe.validation.every_steps or steps_per_epoch)
    return replace(recipe, train=_resolve(train_config, max_steps), validation=validation)


def _resolve(train_config: TrainConfig, max_steps: int) -> TrainConfig:
    warmup_steps = train_config.warmup_steps_of(max_steps)
    return replace(train_config, max_steps=max_steps, epochs=None, warmup_steps=warmup_steps, warmup_ratio=None)
