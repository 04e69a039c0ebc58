"""Options of `qkv train`, and the recipe keys that they set."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from qkv.cli.help import OUTPUT
from qkv.cli.options import delimiter_option, encoding_option

_TRAINING, _DATA, _RUN = "Training", "Data and model", "Run"

_YAML_WORDS = ("true", "false", "yes", "no", "on", "off", "null", "none", "y", "n", "~", ".inf", ".nan")

# options that set one recipe key each; the name of a parameter -> the key
OPTION_KEYS = {
    "epochs": "train.epochs",
    "max_steps": "train.max_steps",
    "learning_rate": "train.learning_rate",
    "batch_size": "train.batch_size",
    "data": "data.train",
    "valid": "data.valid",
    "test": "data.test",
    "format": "data.format",
    "text": "data.columns.text",
    "text_pair": "data.columns.text_pair",
    "label": "data.columns.label",
    "delimiter": "data.delimiter",
    "encoding": "data.encoding",
    "skip_bad": "data.skip_bad",
}


def _complete_task(incomplete: str) -> list[str]:
    from qkv.recipe.task_names import ALIASES, trainable_task_names

    return [name for name in (*trainable_task_names(), *ALIASES) if name.startswith(incomplete)]


RecipeFile = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE", help="Recipe to train: a YAML file or a name of qkv recipes, unless --task is used."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values that replace those of the recipe, such as train.max_steps=100."),
]
TaskName = Annotated[
    str | None,
    typer.Option(
        metavar="TASK",
        help="Train text_classification (classify), token_classification (tag), regression, multi_label, "
        "question_answering, multiple_choice or image_classification without a recipe.",
        autocompletion=_complete_task,
        rich_help_panel=_DATA,
    ),
]
DataPath = Annotated[
    str | None,
    typer.Option(
        "--data", metavar="PATH", help="Train on this file, or on this folder with --format.", rich_help_panel=_DATA
    ),
]
ValidPath = Annotated[
    str | None,
    typer.Option(
        "--valid",
        metavar="PATH",
        help="Validate on the examples of this file.",
        show_default="with --task, a tenth of --data",
        rich_help_panel=_DATA,
    ),
]
TestPath = Annotated[
    str | None,
    typer.Option("--test", metavar="PATH", help="Use this file as the test data of qkv eval.", rich_help_panel=_DATA),
]
InitFrom = Annotated[
    str | None,
    typer.Option(
        "--init-from", metavar="MODEL", help="Fine-tune this run or pretrained checkpoint.", rich_help_panel=_DATA
    ),
]
DataFormat = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="Read the data in this format, such as csv, jsonl, conll or squad.",
        show_default="by the file name",
        rich_help_panel=_DATA,
    ),
]
TextColumn = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="Read the texts from this column.", rich_help_panel=_DATA)
]
TextPairColumn = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="Read the second text of each pair from this column.", rich_help_panel=_DATA),
]
LabelColumn = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="Read the labels from this column.", rich_help_panel=_DATA)
]
Delimiter = Annotated[str | None, delimiter_option(_DATA)]
Encoding = Annotated[str | None, encoding_option(_DATA)]
ReaderOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--reader-option",
        metavar="KEY=VALUE",
        help="Set a column or an option of the format, such as label=stars (repeatable).",
        rich_help_panel=_DATA,
    ),
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Skip invalid examples and list them at the end.", rich_help_panel=_DATA)
]
Epochs = Annotated[
    float | None, typer.Option(metavar="N", help="Pass N times over the training data.", rich_help_panel=_TRAINING)
]
MaxSteps = Annotated[int | None, typer.Option(metavar="N", help="Train for N steps.", rich_help_panel=_TRAINING)]
LearningRate = Annotated[
    float | None, typer.Option(metavar="RATE", help="Peak learning rate.", rich_help_panel=_TRAINING)
]
BatchSize = Annotated[
    int | None, typer.Option(metavar="N", help="Train on N examples per step.", rich_help_panel=_TRAINING)
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue the run in --output, whose recipe is used if none is given, and refuse to start a new one.",
        rich_help_panel=_RUN,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Read the data and print examples, sizes, steps and cost, but train and write nothing.",
        rich_help_panel=_RUN,
    ),
]
PrintRecipe = Annotated[
    bool,
    typer.Option("--print-recipe", help="Print the complete recipe as YAML and train nothing.", rich_help_panel=_RUN),
]
FindLr = Annotated[
    bool,
    typer.Option(
        "--find-lr",
        help="Run a learning-rate range test instead of training and suggest a rate.",
        rich_help_panel=_RUN,
    ),
]
NumSeeds = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Train N runs with different seeds and report mean and standard deviation of each metric.",
        rich_help_panel=_RUN,
    ),
]
NumFolds = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Run N-fold cross-validation of a task and report mean and standard deviation of each metric.",
        rich_help_panel=_RUN,
    ),
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


def option_overrides(options: dict[str, Any]) -> dict[str, str]:
    """Return the options that were given, each with the `key=value` change of the recipe that it stands for."""
    overrides = {}
    for name, key in OPTION_KEYS.items():
        value = options.get(name)
        if value is None or value is False:
            continue
        overrides[f"--{name.replace('_', '-')}"] = f"{key}={to_yaml(value)}"
    return overrides


def to_yaml(value: Any) -> str:
    """Return a text, a number or a switch as a YAML value of one line."""
    needs_quotes = isinstance(value, str) and re.fullmatch(r"[A-Za-z./~][\w./~-]*", value) is None
    if needs_quotes or (isinstance(value, str) and value.lower() in _YAML_WORDS):
        return json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, str) else json.dumps(value)


def describe_overrides(overrides: dict[str, str]) -> str:
    """Return one line with the recipe keys that the options set; "" if there are none."""
    return "; ".join(f"{option} sets {override}" for option, override in overrides.items())
