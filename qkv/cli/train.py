"""`qkv train`: training from a recipe, or of a task on a file of examples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli.help import OUTPUT
from qkv.cli.input_stream import parse_reader_options
from qkv.cli.options import Device, check_device
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.data.examples import Examples
    from qkv.recipe import Recipe

_TRAINING, _TASK = "Training", "Training without a recipe"
RecipeFile = Annotated[
    str | None, typer.Argument(metavar="RECIPE", help="Recipe to train (YAML), unless --task is used.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values that replace those of the recipe, such as train.max_steps=100."),
]
RunOutput = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="Write the run to this folder.",
        show_default="runs/NAME",
        rich_help_panel=OUTPUT,
    ),
]
TensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Write TensorBoard events as well.", rich_help_panel=OUTPUT)
]
FindLr = Annotated[
    bool,
    typer.Option(
        "--find-lr",
        help="Run a learning-rate range test instead of training and suggest a rate.",
        rich_help_panel=_TRAINING,
    ),
]
NumSeeds = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Train N runs with different seeds and report mean and standard deviation of each metric.",
        rich_help_panel=_TRAINING,
    ),
]
NumFolds = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Run N-fold cross-validation of a task and report mean and standard deviation of each metric.",
        rich_help_panel=_TRAINING,
    ),
]
TaskName = Annotated[
    str | None,
    typer.Option(
        metavar="TASK",
        help="Train text_classification (classify), token_classification (tag), regression, multi_label, "
        "question_answering, multiple_choice or image_classification.",
        rich_help_panel=_TASK,
    ),
]
DataPath = Annotated[
    str | None,
    typer.Option(
        "--data", metavar="PATH", help="Train on this file, or on this folder with --format.", rich_help_panel=_TASK
    ),
]
InitFrom = Annotated[
    str | None,
    typer.Option(
        "--init-from", metavar="MODEL", help="Fine-tune this run or pretrained checkpoint.", rich_help_panel=_TASK
    ),
]
ValidPath = Annotated[
    str | None,
    typer.Option(
        "--valid",
        metavar="PATH",
        help="Validate on the examples of this file.",
        show_default="a tenth of --data",
        rich_help_panel=_TASK,
    ),
]
DataFormat = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="Read --data in this format, such as csv, jsonl, conll or squad.",
        show_default="by the file name",
        rich_help_panel=_TASK,
    ),
]
TextColumn = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="Read the texts from this column.", rich_help_panel=_TASK)
]
LabelColumn = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="Read the labels from this column.", rich_help_panel=_TASK)
]
ReaderOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--reader-option",
        metavar="KEY=VALUE",
        help="Set a column or an option of the format, such as label=stars (repeatable).",
        rich_help_panel=_TASK,
    ),
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Skip invalid examples and list them at the end.", rich_help_panel=_TASK)
]


def train(
    recipe: RecipeFile = None,
    overrides: Overrides = None,
    task: TaskName = None,
    data: DataPath = None,
    init_from: InitFrom = None,
    valid: ValidPath = None,
    format: DataFormat = None,
    text: TextColumn = None,
    label: LabelColumn = None,
    reader_option: ReaderOptions = None,
    skip_bad: SkipBad = False,
    find_lr: FindLr = False,
    num_seeds: NumSeeds = None,
    num_folds: NumFolds = None,
    output: RunOutput = None,
    tensorboard: TensorBoard = False,
    device: Device = None,
) -> None:
    """Train a model from a recipe, or fine-tune one on a task without a recipe.

    With --task, a recipe is made from --data, --init-from and the other options, and printed.

    An interrupted run resumes from its last checkpoint when the same command is run again; the result is the same as
    without the interruption.

    Examples:
        qkv train recipes/g2p-transformer.yaml train.max_steps=2000
        qkv train --task classify --data reviews.csv --init-from bert-base-uncased
    """
    from qkv.recipe import read_recipe
    from qkv.train.display import print_on_main

    check_device(device)
    _check_num_runs(num_seeds, num_folds)
    positional = [*([recipe] if recipe is not None else []), *(overrides or [])]
    recipe_path, changes = _split_arguments(positional, task)
    reader_options = parse_reader_options(reader_option, text=text, label=label)
    if recipe_path is not None:
        if any(option is not None for option in (data, init_from, valid, format)) or reader_options or skip_bad:
            raise InputError("a recipe contains its data and model; leave out RECIPE, or --data and similar options")
        parsed, examples = read_recipe(recipe_path, changes), None
    else:
        reader_settings = {"valid": valid, "format": format, "columns": reader_options, "skip_bad": skip_bad}
        parsed, examples = _make_recipe(task, data, init_from, changes, **reader_settings)
    folder = output or Path("runs") / parsed.name
    if num_seeds is not None or num_folds is not None:
        _train_multiple(parsed, folder, device, num_seeds, num_folds, tensorboard)
    elif find_lr:
        _run_lr_range_test(parsed, folder, device, examples)
    elif _train_run(parsed, folder, device, tensorboard, examples):
        print_on_main(f"trained: {folder}")
    else:
        print_on_main(f"{folder} is already trained; try: qkv predict {folder}")


def _check_num_runs(num_seeds: int | None, num_folds: int | None) -> None:
    if num_seeds is not None and num_folds is not None:
        raise InputError("--num-seeds and --num-folds exclude each other; use one of them")
    for option, count in (("--num-seeds", num_seeds), ("--num-folds", num_folds)):
        if count is not None and count < 2:
            raise InputError(f"{option}: {count} is too small for a standard deviation; use 2 or more")


def _split_arguments(args: list[str], task: str | None) -> tuple[Path | None, list[str]]:
    """Split the positional arguments into a recipe and overrides; with --task they are all overrides."""
    if task is None:
        if not args:
            raise InputError("nothing to train; give a RECIPE, or --task with --data and --init-from")
        return Path(args[0]), args[1:]
    not_override = next((arg for arg in args if "=" not in arg), None)
    if not_override is not None:
        raise InputError(
            f"--task makes a recipe itself, but '{not_override}' is not KEY=VALUE; give a RECIPE or --task"
        )
    return None, args


def _make_recipe(
    task: Any, data: str | None, init_from: str | None, overrides: list[str], **reader_settings: Any
) -> tuple[Recipe, dict[str, Examples[Any]]]:
    """Make a recipe from the options and print it, so that it can be saved, changed and trained again.

    Also returns the examples that were read for it.
    """
    from qkv.recipe.parse import dump_yaml, validate_recipe
    from qkv.train.auto_recipe import make_recipe
    from qkv.train.display import print_on_main

    if data is None:
        raise InputError("--task needs training data; give --data")
    if init_from is None and not any(override.startswith("model") for override in overrides):
        model_overrides = (
            "model.family=vit model.image_size=… model.patch_size=…"
            if task == "image_classification"
            else "model.family=… tokenizer.vocab_size=…"
        )
        raise InputError(f"--task needs a model to start from; give --init-from, or {model_overrides} for a new one")
    raw, examples = make_recipe(task, data, init_from, overrides, **reader_settings)
    recipe = validate_recipe(raw, "the command line")
    print_on_main(dump_yaml(raw))
    return recipe, examples


def _train_run(
    recipe: Recipe,
    folder: Path,
    device: str | None,
    tensorboard: bool,
    examples: dict[str, Examples[Any]] | None = None,
) -> bool:
    from qkv.train.display import display, log_tensorboard
    from qkv.train.trainer import fit

    records = fit(recipe, folder, device=device, data=examples)
    return display(log_tensorboard(records, folder) if tensorboard else records, recipe.train.max_steps)


def _train_multiple(
    recipe: Recipe, folder: Path, device: str | None, num_seeds: int | None, num_folds: int | None, tensorboard: bool
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
    print_on_main(f"summary as JSON: {summary_path}")


def _run_lr_range_test(
    recipe: Recipe, folder: Path, device: str | None, examples: dict[str, Examples[Any]] | None
) -> None:
    from qkv.files import atomic_write_text
    from qkv.train.perf.lr_range_test import lr_range_test

    range_test = lr_range_test(recipe, device=device, data=examples)
    plot_path = folder.with_name(f"{folder.name}-rates.png")
    table_path = folder.with_name(f"{folder.name}-rates.tsv")
    range_test.plot(plot_path)
    atomic_write_text(table_path, range_test.tsv())
    print(f"loss by learning rate: {plot_path} (plot), {table_path} (table)")
    print(f"suggested learning rate: train.learning_rate={range_test.suggested_lr():.1e}")
