"""Commands that train a model and look at one that was trained here: train, look, cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from qkv.cli import options
from qkv.cli.options import Device, RunFolder, check_device, load_model
from qkv.cli.tasks import Columns, SkipBad, column_names
from qkv.errors import InputError


def train(
    words: options.RecipeAndChanges = None,
    output: options.RunOutput = None,
    device: Device = None,
    tensorboard: options.TensorBoard = False,
    find_lr: options.FindRate = False,
    seeds: options.Seeds = None,
    folds: options.Folds = None,
    task: options.TaskName = None,
    data: options.TaskFile = None,
    start: options.Start = None,
    valid: options.ValidFile = None,
    format: options.DataFormat = None,
    text: options.TextColumn = None,
    label: options.LabelColumn = None,
    column: Columns = None,
    skip_bad: SkipBad = False,
) -> None:
    """Train what RECIPE describes, or a task on your own file.

    qkv train --task classify --data mine.csv --text review --label stars --from MODEL

    Kill it at any moment: the same command goes on, as if it had never stopped.
    """
    from qkv.train import read_recipe
    from qkv.train.progress import say

    check_device(device)
    _check_times(seeds, folds)
    given, changes = _recipe_and_changes(words or [], task)
    named = column_names(column, text=text, label=label)
    if given is not None:
        if any(option is not None for option in (data, start, valid, format)) or named or skip_bad:
            raise InputError("a recipe names its data and model itself; leave out RECIPE, or --data and the like")
        read: Any = read_recipe(given, changes)
    else:
        read = _made(task, data, start, changes, valid=valid, format=format, columns=named, skip_bad=skip_bad)
    folder = output or Path("runs") / read.name
    if seeds is not None or folds is not None:
        _train_several(read, folder, device, seeds, folds, tensorboard)
    elif find_lr:
        _find_rate(read, folder, device)
    elif _train_one(read, folder, device, tensorboard):
        say(f"trained: {folder}")
    else:
        say(f"{folder} is already trained; try: qkv predict {folder}")


def _check_times(seeds: int | None, folds: int | None) -> None:
    if seeds is not None and folds is not None:
        raise InputError("--seeds and --folds: give one of the two")
    for option, count in (("--seeds", seeds), ("--folds", folds)):
        if count is not None and count < 2:
            raise InputError(f"{option}: {count} run has no deviation; give 2 or more")


def _recipe_and_changes(words: list[str], task: str | None) -> tuple[Path | None, list[str]]:
    """What stands on the command line beside options: with --task changes alone, else a recipe before them."""
    if task is None:
        if not words:
            raise InputError("nothing to train; give a RECIPE, or --task with --data and --from")
        return Path(words[0]), words[1:]
    wrong = next((word for word in words if "=" not in word), None)
    if wrong is not None:
        raise InputError(f"--task makes a recipe, and '{wrong}' is one, or no change; give a RECIPE or --task")
    return None, words


def _made(task: Any, data: str | None, start: str | None, changes: list[str], **others: Any) -> Any:
    """A recipe out of options, which is shown: written to a file, it can be changed and run again."""
    from qkv.train.making import made
    from qkv.train.progress import say
    from qkv.train.recipe import as_yaml, checked

    if data is None:
        raise InputError("--task needs examples to learn from; give --data")
    if start is None and not any(change.startswith("model") for change in changes):
        fresh = "model.family=vit model.image=… model.patch=…" if task == "picture" else "model.family=… text.size=…"
        raise InputError(f"--task needs a model to start from; give --from, or {fresh} for a new one")
    raw = made(task, data, start, changes, **others)
    read = checked(raw, "the command line")
    say(as_yaml(raw))
    return read


def _train_one(recipe: Any, folder: Path, device: str | None, tensorboard: bool) -> bool:
    from qkv.train import fit
    from qkv.train.progress import events, show

    records = fit(recipe, folder, device=device)
    return show(events(records, folder) if tensorboard else records, recipe.train.steps)


def _train_several(
    recipe: Any, folder: Path, device: str | None, seeds: int | None, folds: int | None, tensorboard: bool
) -> None:
    import json

    from qkv.files import write_text
    from qkv.train.progress import say
    from qkv.train.several import figures, render, summary, with_folds, with_seeds

    found = {}
    for one in with_folds(recipe, folder, folds) if folds is not None else with_seeds(recipe, folder, seeds or 0):
        say(f"{one.name}: {one.folder}")
        _train_one(one.recipe, one.folder, device, tensorboard)
        found[one.name] = figures(one.folder)
    told = summary(found)
    say(render(told))
    table = folder.with_name(f"{folder.name}-{'seeds' if folds is None else 'folds'}.json")
    write_text(table, json.dumps(told, indent=2) + "\n")
    say(f"{table}: the same as JSON")


def _find_rate(recipe: Any, folder: Path, device: str | None) -> None:
    from qkv.files import write_text
    from qkv.train.fit import find_rate

    found = find_rate(recipe, device=device)
    picture, table = folder.with_name(f"{folder.name}-rates.png"), folder.with_name(f"{folder.name}-rates.tsv")
    found.plot(picture)
    write_text(table, found.tsv())
    print(f"{picture}: the loss over the rate ({table.name}: as a table)")
    print(f"suggested: train.learning_rate={found.suggestion():.1e}")


def look(
    run: RunFolder,
    texts: Annotated[list[str], typer.Argument(metavar="TEXT...", help="Inputs, a panel each.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture: .png, .svg or .pdf.")] = Path("map.png"),
    target: Annotated[list[str] | None, typer.Option(help="Outputs to align with, instead of the model's own.")] = None,
    layer: Annotated[
        str | None, typer.Option(help="Which attention, such as decoder.1.cross; by default the last.")
    ] = None,
    heads: Annotated[str, typer.Option(help="mean, each, or numbers such as 0,2.")] = "mean",
    device: Device = None,
) -> None:
    """The alignment plot: input across, output down, a panel a head or their mean."""
    from qkv.look.alignment import plot_alignment, plot_alignments
    from qkv.look.words import alignments

    if target is not None and len(target) != len(texts):
        raise InputError(f"{len(texts)} texts and {len(target)} targets; give one --target for each text")
    chosen = _heads(heads)
    found = alignments(load_model(run, device), texts, target, layer)
    if len(found) == 1:
        one = found[0]
        plot_alignment(one.weights, one.source, one.target, output, title=texts[0], heads=chosen)
    else:
        if chosen != "mean":
            raise InputError("--heads shows the heads of one text; give one TEXT, or leave it at mean")
        items = [(a.weights.mean(0), a.source, a.target, text) for a, text in zip(found, texts, strict=True)]
        plot_alignments(items, output)
    print(f"{output}: attention of {found[0].layer}")


def cost(
    what: Annotated[Path, typer.Argument(metavar="RECIPE|RUN", help="A recipe, or a run's folder.")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="As in train.")] = None,
    source_length: Annotated[
        int | None, typer.Option("--source-length", "-m", help="M; by default the data's mean.")
    ] = None,
    target_length: Annotated[
        int | None, typer.Option("--target-length", "-n", help="N; by default the data's mean.")
    ] = None,
    vocabulary: Annotated[
        str | None, typer.Option(help="Sizes such as 30,40 where a recipe's data is not at hand.")
    ] = None,
) -> None:
    """Parameters by part, FLOPs a token and a run, memory, and the three attentions' costs."""
    from qkv.look.bill import render
    from qkv.look.cost import cost as count
    from qkv.train.measure import Measured, measure

    measured: Measured = measure(what, changes or [], vocabulary)
    recipe = measured.recipe
    print(
        render(
            count(
                measured.spec,
                source_length=measured.source_length if source_length is None else source_length,
                target_length=measured.target_length if target_length is None else target_length,
                batch_tokens=recipe.train.batch_tokens if recipe else None,
                steps=recipe.train.steps if recipe else None,
            )
        )
    )


def _heads(text: str) -> Literal["mean", "each"] | list[int]:
    if text in ("mean", "each"):
        return text  # type: ignore[return-value]
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--heads is mean, each, or numbers such as 0,2, not '{text}'") from None
