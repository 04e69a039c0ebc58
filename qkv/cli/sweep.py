"""`qkv sweep`: hyper-parameter search over recipe keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.help import OUTPUT
from qkv.cli.options import Device, check_device
from qkv.cli.tables import print_table
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.train.sweep import Sweep, TrialResult

_SEARCH = "Search"
_MAX_ROWS = 10


RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe whose keys are varied (YAML).")]
Space = Annotated[
    list[str],
    typer.Argument(
        metavar="KEY=VALUES",
        help="Values of a key (low..high, low..high:log, low..high:step=N or a,b,c), or one value that is the same "
        "in all trials.",
    ),
]
NumTrials = Annotated[
    int, typer.Option("--num-trials", "-n", metavar="N", help="Train N trials in all.", rich_help_panel=_SEARCH)
]
Prune = Annotated[
    bool,
    typer.Option(
        help="End trials early whose validation metric is worse than the median of the earlier ones.",
        rich_help_panel=_SEARCH,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Draw values with this seed.", show_default="that of the recipe", rich_help_panel=_SEARCH
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="Write the sweep to this folder.",
        show_default="runs/NAME-sweep",
        rich_help_panel=OUTPUT,
    ),
]
KeepAll = Annotated[
    bool,
    typer.Option("--keep-all", help="Keep the weights of all trials, not only the best.", rich_help_panel=OUTPUT),
]


def sweep(
    recipe: RecipeFile,
    space: Space,
    num_trials: NumTrials = 20,
    prune: Prune = True,
    seed: Seed = None,
    output: Output = None,
    keep_all: KeepAll = False,
    device: Device = None,
) -> None:
    """Search the best values of recipe keys with Optuna.

    Each trial is a run of the recipe with other values, chosen by a tree-structured Parzen estimator from the results
    so far. An interrupted sweep continues when the same command is run again, and a larger --num-trials extends it.
    Several processes may run the same command at once and share the trials.

    Examples:
        qkv sweep banking77 train.learning_rate=1e-5..1e-3:log
        qkv sweep g2p-demo model.dropout=0..0.3 train.max_steps=500 -n 10
    """
    from qkv.recipe.search_space import parse_search_space
    from qkv.train.sweep import Sweep

    check_device(device)
    if num_trials < 1:
        raise InputError(f"--num-trials must be 1 or more, not {num_trials}")
    if seed is not None and not 0 <= seed < 2**31:
        raise InputError(f"--seed must be between 0 and {2**31 - 1}, not {seed}")
    folder = output or Path("runs") / f"{recipe.stem}-sweep"
    search = Sweep(recipe, parse_search_space(space), folder, prune=prune, seed=seed)
    for result in search.run(num_trials, device):
        print(_trial_line(search, result, num_trials), flush=True)
        search.write_results(keep_all)
    _print_results(search, keep_all)


def _trial_line(search: Sweep, result: TrialResult, num_trials: int) -> str:
    values = " ".join(f"{key}={_format(value)}" for key, value in result.values.items())
    outcome = f"failed: {result.error}" if result.state == "failed" else f"{search.metric} {_format(result.metric)}"
    if result.state == "pruned":
        outcome += f", pruned at step {result.step}"
    return f"trial {result.number} of {num_trials}: {values}: {outcome}"


def _print_results(search: Sweep, keep_all: bool) -> None:
    from qkv.train.sweep import BEST_RECIPE, TRIALS_TABLE

    best = search.write_results(keep_all)
    ranked = search.ranked()
    keys = [dimension.key for dimension in search.space.dimensions]
    rows = [
        [str(r.number), r.state, _format(r.metric), f"{r.step:,}", *(_format(r.values.get(key)) for key in keys)]
        for r in ranked[:_MAX_ROWS]
    ]
    print()
    print_table(["trial", "state", search.metric or "metric", "step", *keys], rows, text_columns=2)
    if len(ranked) > _MAX_ROWS:
        print(f"the first {_MAX_ROWS} of {len(ranked)} trials; {search.folder / TRIALS_TABLE} has all")
    if best is None:
        raise InputError("no trial was completed; run more, or use --no-prune")
    print(f"best recipe: {search.folder / BEST_RECIPE}; its run: {best.folder}")


def _format(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
