"""`qkv train`: training from a recipe, or of a task on a file of examples."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qkv.cli import train_options as options
from qkv.cli.input_stream import parse_reader_options
from qkv.cli.options import Device, check_device
from qkv.errors import InputError, quote

if TYPE_CHECKING:
    from qkv.data.examples import Examples
    from qkv.recipe import Recipe

_MAX_RUNS = 1000  # of --num-seeds and --num-folds
_TASK_ARGUMENTS = ("data", "valid", "format", "text", "text_pair", "label", "delimiter", "encoding", "skip_bad")


def train(
    recipe: options.RecipeFile = None,
    overrides: options.Overrides = None,
    task: options.TaskName = None,
    data: options.DataPath = None,
    valid: options.ValidPath = None,
    test: options.TestPath = None,
    init_from: options.InitFrom = None,
    format: options.DataFormat = None,
    text: options.TextColumn = None,
    text_pair: options.TextPairColumn = None,
    label: options.LabelColumn = None,
    delimiter: options.Delimiter = None,
    encoding: options.Encoding = None,
    reader_option: options.ReaderOptions = None,
    skip_bad: options.SkipBad = False,
    epochs: options.Epochs = None,
    max_steps: options.MaxSteps = None,
    learning_rate: options.LearningRate = None,
    batch_size: options.BatchSize = None,
    resume: options.Resume = False,
    dry_run: options.DryRun = False,
    print_recipe: options.PrintRecipe = False,
    find_lr: options.FindLr = False,
    num_seeds: options.NumSeeds = None,
    num_folds: options.NumFolds = None,
    output: options.RunOutput = None,
    tensorboard: options.TensorBoard = False,
    device: Device = None,
) -> None:
    """Train a model from a recipe, or fine-tune one on a task without a recipe.

    With --task, a recipe is made from --data, --init-from and the other options, and printed.

    An interrupted run resumes from its last checkpoint when the same command is run again; the result is the same as
    without the interruption.

    Examples:
        qkv train g2p-transformer --max-steps 2000
        qkv train --task classify --data reviews.csv --init-from bert-base-uncased
        qkv train --resume --output runs/g2p-transformer --epochs 20
    """
    values = dict(locals())  # of all options, by their names
    check_device(device)
    _check_mode(values)
    named = {name: values[name] for name in options.OPTION_KEYS}
    arguments = _Arguments(recipe, overrides or [], task, init_from, named, parse_reader_options(reader_option))
    run = _resolve_run(arguments, output, resume=resume, quiet=print_recipe)
    if print_recipe:
        _print_recipe(run.recipe)
    elif dry_run:
        _print_dry_run(run)
    elif num_seeds is not None or num_folds is not None:
        _train_multiple(run.recipe, run.folder, device, num_seeds, num_folds, tensorboard)
    elif find_lr:
        _run_lr_range_test(run.recipe, run.folder, device, run.examples)
    else:
        _train_one(run, device, tensorboard)


class _Arguments(NamedTuple):
    """What a run is made of, as the command line has it."""

    recipe: str | None
    overrides: list[str]
    task: str | None
    init_from: str | None
    named: dict[str, Any]  # values of the options of `OPTION_KEYS`, by the name of the parameter
    reader_options: dict[str, Any]


class _Run(NamedTuple):
    """A run that is to be trained."""

    recipe: Recipe
    folder: Path
    examples: dict[str, Examples[Any]] | None  # of a task, if they were already read


def _check_mode(values: dict[str, Any]) -> None:
    """Refuse options that exclude each other."""
    modes = [name for name in ("dry_run", "print_recipe", "find_lr") if values[name]]
    modes += [name for name in ("num_seeds", "num_folds") if values[name] is not None]
    chosen = [f"--{name.replace('_', '-')}" for name in modes]
    if len(chosen) > 1:
        raise InputError(f"{chosen[0]} and {chosen[1]} exclude each other; use one of them")
    if values["resume"] and chosen and chosen[0] not in ("--dry-run", "--print-recipe"):
        raise InputError(f"--resume continues one run; leave out {chosen[0]}")
    for option in ("num_seeds", "num_folds"):
        count = values[option]
        if count is not None and count < 2:
            raise InputError(
                f"--{option.replace('_', '-')}: {count} is too small for a standard deviation; use 2 or more"
            )
        if count is not None and count > _MAX_RUNS:
            raise InputError(f"--{option.replace('_', '-')}: {count:,} runs are too many; use {_MAX_RUNS:,} or fewer")


def _resolve_run(arguments: _Arguments, output: Path | None, *, resume: bool, quiet: bool) -> _Run:
    """Return the recipe, the folder and the examples of a run, and print the recipe keys that options set.

    Args:
        arguments: the command line.
        output: the run folder; None: runs/NAME.
        resume: there must be a run in the folder.
        quiet: the recipe of a task is not printed.
    """
    from qkv.train.display import is_main_rank
    from qkv.train.run_folder import holds_run

    positional = [*([arguments.recipe] if arguments.recipe is not None else []), *arguments.overrides]
    recipe_path, changes = _split_arguments(positional, arguments.task, output, resume=resume)
    if recipe_path is not None:
        recipe, line = _read_recipe(recipe_path, changes, arguments)
        run = _Run(recipe, output or Path("runs") / recipe.name, None)
    else:
        recipe, examples, line, text = _make_recipe(arguments, changes)
        run = _Run(recipe, output or Path("runs") / recipe.name, examples)
        if not quiet and is_main_rank() and not holds_run(run.folder):  # a run that is continued has printed it
            print(text, flush=True)
    if resume and not holds_run(run.folder):
        raise InputError(f"--resume: {run.folder} holds no run; give its folder as --output, or leave --resume out")
    if line and is_main_rank():
        print(line, file=sys.stderr)
    return run


def _split_arguments(
    args: list[str], task: str | None, output: Path | None, *, resume: bool
) -> tuple[str | Path | None, list[str]]:
    """Split the positional arguments into a recipe and overrides; with --task they are all overrides.

    With --resume and no recipe, the recipe is that of the run in `output`.
    """
    from qkv.recipe.parse import RECIPE_FILE

    if task is None:
        if resume and output is not None and (not args or "=" in args[0]):
            if not (output / RECIPE_FILE).is_file():
                raise InputError(f"--resume: {output} holds no run; give the folder of one as --output")
            return output / RECIPE_FILE, args
        if resume and not args:
            raise InputError("--resume needs --output, the folder of the run, or a RECIPE")
        if not args:
            raise InputError("nothing to train; give a RECIPE, or --task with --data and --init-from")
        return args[0], args[1:]
    not_override = next((arg for arg in args if "=" not in arg), None)
    if not_override is not None:
        raise InputError(
            f"--task makes a recipe itself, but {quote(not_override)} is not KEY=VALUE; give a RECIPE or --task"
        )
    return None, args


def _read_recipe(path: str | Path, changes: list[str], arguments: _Arguments) -> tuple[Recipe, str]:
    """Read a recipe and apply the options; also return a line with the keys that they set."""
    from qkv.recipe.parse import apply_overrides, read_raw_recipe, validate_recipe

    raw = read_raw_recipe(path)
    overrides = options.option_overrides(arguments.named)
    overrides |= {
        f"--reader-option {key}": f"data.columns.{key}={options.to_yaml(value)}"
        for key, value in arguments.reader_options.items()
    }
    line = options.describe_overrides(overrides)
    if arguments.init_from is not None:
        _replace_model(raw, arguments.init_from)
        line = "; ".join(filter(None, [f"--init-from sets model.init_from={arguments.init_from}", line]))
    apply_overrides(raw, [*overrides.values(), *changes])
    return validate_recipe(raw, str(path)), line


def _replace_model(raw: dict[str, Any], init_from: str) -> None:
    """Replace the model of a recipe by a pretrained one, which has its own tokenizer."""
    from qkv.recipe.model_section import DROPOUT_KEYS

    section = raw.get("model")
    dropout = {key: section[key] for key in DROPOUT_KEYS if key in section} if isinstance(section, dict) else {}
    raw["model"] = {"init_from": init_from, **dropout}
    raw.pop("tokenizer", None)


def _make_recipe(arguments: _Arguments, changes: list[str]) -> tuple[Recipe, dict[str, Examples[Any]], str, str]:
    """Make the recipe of a task.

    Returns the recipe, the examples that were read for it, a line with the keys that options set, and the recipe as
    YAML, so that it can be saved, changed and trained again.
    """
    from qkv.recipe.parse import dump_yaml, validate_recipe
    from qkv.train.auto_recipe import make_recipe

    task, named = arguments.task or "", arguments.named
    if named["data"] is None:
        raise InputError("--task needs training data; give --data")
    if arguments.init_from is None and not any(change.startswith("model") for change in changes):
        model_overrides = (
            "model.family=vit model.image_size=… model.patch_size=…"
            if task == "image_classification"
            else "model.family=… tokenizer.vocab_size=…"
        )
        raise InputError(f"--task needs a model to start from; give --init-from, or {model_overrides} for a new one")
    columns = {key: named[key] for key in ("text", "text_pair", "label", "delimiter", "encoding")}
    overrides = options.option_overrides({key: value for key, value in named.items() if key not in _TASK_ARGUMENTS})
    raw, examples = make_recipe(
        task,
        named["data"],
        arguments.init_from,
        [*overrides.values(), *changes],
        valid=named["valid"],
        format=named["format"],
        columns={key: value for key, value in columns.items() if value is not None} | arguments.reader_options,
        skip_bad=named["skip_bad"],
    )
    line = options.describe_overrides(overrides)
    return validate_recipe(raw, "the command line"), examples, line, dump_yaml(raw)


def _print_recipe(recipe: Recipe) -> None:
    from qkv.recipe.parse import recipe_to_yaml

    sys.stdout.write(recipe_to_yaml(recipe))


def _print_dry_run(run: _Run) -> None:
    from qkv.train.dry_run import dry_run

    for line in dry_run(run.recipe, run.folder, run.examples):
        print(line)


def _train_one(run: _Run, device: str | None, tensorboard: bool) -> None:
    from qkv.train.display import print_on_main

    if _train_run(run.recipe, run.folder, device, tensorboard, run.examples):
        print_on_main(f"trained: {run.folder}")
    else:
        hint = f"more train.max_steps or train.epochs extend it; try: qkv predict {run.folder}"
        print_on_main(f"{run.folder} is already trained; {hint}")


def _train_run(
    recipe: Recipe,
    folder: Path,
    device: str | None,
    tensorboard: bool,
    examples: dict[str, Examples[Any]] | None = None,
) -> bool:
    from qkv.train.display import display, exit_if_interrupted, log_tensorboard
    from qkv.train.fit import fit

    records = fit(recipe, folder, device=device, data=examples)
    with exit_if_interrupted():
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
