"""The command that trains a model: train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qkv.cli import options
from qkv.cli.options import Device, check_device
from qkv.cli.run_task import ReaderOptions, SkipBad, parse_reader_options
from qkv.errors import InputError


def train(
    args: options.RecipeAndOverrides = None,
    output: options.RunOutput = None,
    device: Device = None,
    tensorboard: options.TensorBoard = False,
    find_lr: options.FindLr = False,
    num_seeds: options.NumSeeds = None,
    num_folds: options.NumFolds = None,
    task: options.TaskName = None,
    data: options.DataFile = None,
    init_from: options.InitFrom = None,
    valid: options.ValidFile = None,
    format: options.DataFormat = None,
    text: options.TextColumn = None,
    label: options.LabelColumn = None,
    reader_option: ReaderOptions = None,
    skip_bad: SkipBad = False,
) -> None:
    """Train what RECIPE describes, or a task on your own file.

    qkv train --task text_classification --data mine.csv --text review --label stars --init-from MODEL

    Kill it at any moment: the same command goes on, as if it had never stopped.
    """
    from qkv.recipe import read_recipe
    from qkv.train.display import print_on_main

    check_device(device)
    _check_num_runs(num_seeds, num_folds)
    recipe_path, overrides = _recipe_and_overrides(args or [], task)
    reader_options = parse_reader_options(reader_option, text=text, label=label)
    if recipe_path is not None:
        if any(option is not None for option in (data, init_from, valid, format)) or reader_options or skip_bad:
            raise InputError("a recipe names its data and model itself; leave out RECIPE, or --data and the like")
        recipe: Any = read_recipe(recipe_path, overrides)
    else:
        reader_settings = {"valid": valid, "format": format, "columns": reader_options, "skip_bad": skip_bad}
        recipe = _make_recipe(task, data, init_from, overrides, **reader_settings)
    folder = output or Path("runs") / recipe.name
    if num_seeds is not None or num_folds is not None:
        _train_multiple(recipe, folder, device, num_seeds, num_folds, tensorboard)
    elif find_lr:
        _run_lr_range_test(recipe, folder, device)
    elif _train_run(recipe, folder, device, tensorboard):
        print_on_main(f"trained: {folder}")
    else:
        print_on_main(f"{folder} is already trained; try: qkv predict {folder}")


def _check_num_runs(num_seeds: int | None, num_folds: int | None) -> None:
    if num_seeds is not None and num_folds is not None:
        raise InputError("--num-seeds and --num-folds: give one of the two")
    for option, count in (("--num-seeds", num_seeds), ("--num-folds", num_folds)):
        if count is not None and count < 2:
            raise InputError(f"{option}: {count} run has no deviation; give 2 or more")


def _recipe_and_overrides(args: list[str], task: str | None) -> tuple[Path | None, list[str]]:
    """What stands on the command line beside options: with --task changes alone, else a recipe before them."""
    if task is None:
        if not args:
            raise InputError("nothing to train; give a RECIPE, or --task with --data and --init-from")
        return Path(args[0]), args[1:]
    not_override = next((arg for arg in args if "=" not in arg), None)
    if not_override is not None:
        raise InputError(f"--task makes a recipe, and '{not_override}' is one, or no change; give a RECIPE or --task")
    return None, args


def _make_recipe(
    task: Any, data: str | None, init_from: str | None, overrides: list[str], **reader_settings: Any
) -> Any:
    """A recipe out of options, which is shown: written to a file, it can be changed and run again."""
    from qkv.recipe.parse import dump_yaml, validate_recipe
    from qkv.train.auto_recipe import make_recipe
    from qkv.train.display import print_on_main

    if data is None:
        raise InputError("--task needs examples to learn from; give --data")
    if init_from is None and not any(override.startswith("model") for override in overrides):
        model_overrides = (
            "model.family=vit model.image_size=… model.patch_size=…"
            if task == "image_classification"
            else "model.family=… tokenizer.vocab_size=…"
        )
        raise InputError(f"--task needs a model to start from; give --init-from, or {model_overrides} for a new one")
    raw = make_recipe(task, data, init_from, overrides, **reader_settings)
    recipe = validate_recipe(raw, "the command line")
    print_on_main(dump_yaml(raw))
    return recipe


def _train_run(recipe: Any, folder: Path, device: str | None, tensorboard: bool) -> bool:
    from qkv.train.display import display, log_tensorboard
    from qkv.train.trainer import fit

    records = fit(recipe, folder, device=device)
    return display(log_tensorboard(records, folder) if tensorboard else records, recipe.train.max_steps)


def _train_multiple(
    recipe: Any, folder: Path, device: str | None, num_seeds: int | None, num_folds: int | None, tensorboard: bool
) -> None:
    import json

    from qkv.files import atomic_write_text
    from qkv.train.display import print_on_main
    from qkv.train.multi_run import final_metrics, render, summary, with_folds, with_seeds

    metrics_by_run = {}
    variants = (
        with_seeds(recipe, folder, num_seeds or 0) if num_folds is None else with_folds(recipe, folder, num_folds)
    )
    for variant in variants:
        print_on_main(f"{variant.name}: {variant.folder}")
        _train_run(variant.recipe, variant.folder, device, tensorboard)
        metrics_by_run[variant.name] = final_metrics(variant.folder)
    aggregate = summary(metrics_by_run)
    print_on_main(render(aggregate))
    summary_path = folder.with_name(f"{folder.name}-{'seeds' if num_folds is None else 'folds'}.json")
    atomic_write_text(summary_path, json.dumps(aggregate, indent=2) + "\n")
    print_on_main(f"{summary_path}: the same as JSON")


def _run_lr_range_test(recipe: Any, folder: Path, device: str | None) -> None:
    from qkv.files import atomic_write_text
    from qkv.train.trainer import lr_range_test

    range_test = lr_range_test(recipe, device=device)
    plot_path = folder.with_name(f"{folder.name}-rates.png")
    table_path = folder.with_name(f"{folder.name}-rates.tsv")
    range_test.plot(plot_path)
    atomic_write_text(table_path, range_test.tsv())
    print(f"{plot_path}: the loss over the rate ({table_path.name}: as a table)")
    print(f"suggested: train.learning_rate={range_test.suggested_lr():.1e}")
