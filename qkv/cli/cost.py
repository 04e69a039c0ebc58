"""`qkv cost`: parameters, FLOPs and memory of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qkv.cli.help import INPUT

RecipeOrRun = Annotated[Path, typer.Argument(metavar="RECIPE|RUN", help="Recipe file, or folder of a run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values that replace those of the recipe, such as model.layers=4."),
]
SourceLength = Annotated[
    int | None,
    typer.Option(
        "--source-length",
        "-m",
        metavar="M",
        help="Assume sources of M tokens.",
        show_default="mean of the data",
        rich_help_panel=INPUT,
    ),
]
TargetLength = Annotated[
    int | None,
    typer.Option(
        "--target-length",
        "-n",
        metavar="N",
        help="Assume targets of N tokens.",
        show_default="mean of the data",
        rich_help_panel=INPUT,
    ),
]
VocabSizes = Annotated[
    str | None,
    typer.Option(
        metavar="SIZES",
        help="Assume these vocabulary sizes, such as 30,40 (source, target) or one for both, not those of the data.",
        rich_help_panel=INPUT,
    ),
]


def cost(
    recipe_or_run: RecipeOrRun,
    overrides: Overrides = None,
    source_length: SourceLength = None,
    target_length: TargetLength = None,
    vocab_size: VocabSizes = None,
) -> None:
    """Estimate the parameters, FLOPs and memory of a model.

    Shows parameters by component, FLOPs per token and per run, memory, and the cost of each kind of attention.

    Examples:
        qkv cost recipes/g2p-transformer.yaml model.layers=4
        qkv cost runs/g2p-demo --source-length 100 --target-length 100
    """
    from qkv.analysis.cost import cost as compute_cost
    from qkv.analysis.cost_table import render_cost_table
    from qkv.train.cost_inputs import infer_cost_inputs

    inputs = infer_cost_inputs(recipe_or_run, overrides or [], vocab_size)
    source_length = inputs.source_length if source_length is None else source_length
    target_length = inputs.target_length if target_length is None else target_length
    model_cost = compute_cost(
        inputs.spec,
        source_length=source_length,
        target_length=target_length,
        memory_length=inputs.memory_length,
        batch_tokens=inputs.batch_tokens(source_length + target_length),
        steps=inputs.recipe.train.max_steps if inputs.recipe else None,
    )
    print(render_cost_table(model_cost))
