"""How long a run is. A recipe may say it in epochs and shares; the loop counts steps."""

from __future__ import annotations

from dataclasses import replace

from qkv.train.sections import AnyRecipe, TaskRecipe
from qkv.train.work import Work


def in_steps(recipe: AnyRecipe, work: Work) -> AnyRecipe:
    """The recipe with all its durations as numbers of steps; what is written down stays as the user said it."""
    from qkv.train.tuning import TaskWork  # brings the tasks with it, which others need not wait for

    how = recipe.train
    if not isinstance(recipe, TaskRecipe) or not isinstance(work, TaskWork):
        assert how.steps is not None  # epochs of others are refused as the recipe is read
        return replace(recipe, train=replace(how, warmup=_warmup(how.warmup, how.steps)))
    epoch = work.in_epoch()
    steps = max(1, round((how.epochs or 0) * epoch)) if how.steps is None else how.steps
    train = replace(how, steps=steps, epochs=None, warmup=_warmup(how.warmup, steps))
    return replace(recipe, train=train, valid=replace(recipe.valid, every=recipe.valid.every or epoch))


def _warmup(said: float, steps: int) -> int:
    return round(said * steps if said < 1 else said)
