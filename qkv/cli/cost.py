"""The command that counts a model's parameters, FLOPs and memory: cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def cost(
    recipe_or_run: Annotated[Path, typer.Argument(metavar="RECIPE|RUN", help="A recipe, or a run's folder.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="As in train.")] = None,
    source_length: Annotated[
        int | None, typer.Option("--source-length", "-m", help="M; by default the data's mean.")
    ] = None,
    target_length: Annotated[
        int | None, typer.Option("--target-length", "-n", help="N; by default the data's mean.")
    ] = None,
    vocab_size: Annotated[
        str | None, typer.Option(help="Sizes such as 30,40 where a recipe's data is not at hand.")
    ] = None,
) -> None:
    """Parameters by part, FLOPs a token and a run, memory, and the three attentions' costs."""
    from qkv.analysis.cost import cost as compute_cost
    from qkv.analysis.cost_table import render_cost_table
    from qkv.train.cost_inputs import CostInputs, infer_cost_inputs

    cost_inputs: CostInputs = infer_cost_inputs(recipe_or_run, overrides or [], vocab_size)
    recipe = cost_inputs.recipe
    print(
        render_cost_table(
            compute_cost(
                cost_inputs.spec,
                source_length=cost_inputs.source_length if source_length is None else source_length,
                target_length=cost_inputs.target_length if target_length is None else target_length,
                batch_tokens=recipe.train.batch_tokens if recipe else None,
                steps=recipe.train.max_steps if recipe else None,
            )
        )
    )
