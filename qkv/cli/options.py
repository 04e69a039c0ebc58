"""What the commands share: their options, and how a folder, a device and a choice are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qkv.errors import InputError
from qkv.renamed import renamed_value_message

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A trained run's folder.")]
ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="A run, a checkpoint folder, or a name in the Hugging Face cache.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")]
NumBeams = Annotated[int, typer.Option(help="Beam width; 1 is greedy.")]
LengthPenalty = Annotated[float, typer.Option(help="Beams are ranked by log-probability / length^penalty.")]
MaxNewTokens = Annotated[
    int | None, typer.Option(help="Longest output in tokens; by default twice the input and 16 more.")
]
OutputFolder = Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")]
OnTooLong = Annotated[str, typer.Option(help="An input over the model's length: refuse or truncate.")]
OnUnknown = Annotated[str, typer.Option(help="A token that was never seen in training: refuse or replace.")]
Texts = Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Inputs; - reads them from stdin.")]
InputFile = Annotated[Path | None, typer.Option("--file", "-f", help="One input a line, or what --format says.")]
ParseSpecialTokens = Annotated[
    bool, typer.Option("--parse-special-tokens", help="Read special tokens in a text, such as T5's <extra_id_0>, as such.")
]
SubwordPooling = Annotated[
    str | None, typer.Option(help="What stands for a word of several tokens: its first one, or their mean.")
]

# of `qkv train`: a recipe, or what one is made of
RecipeAndOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] [KEY=VALUE]...",
        help="A recipe (YAML), unless --task makes one; changes of its keys, train.max_steps=100 ….",
    ),
]
RunOutput = Annotated[Path | None, typer.Option("--output", "-o", help="The run's folder; by default runs/NAME.")]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard events.")]
FindLr = Annotated[
    bool, typer.Option("--find-lr", help="Train nothing: raise the rate from step to step and suggest one.")
]
NumSeeds = Annotated[
    int | None, typer.Option(help="Train so often, each time with another seed; each figure's mean and deviation.")
]
NumFolds = Annotated[
    int | None, typer.Option(help="The same, holding out another part of a task's training examples each time.")
]
TaskName = Annotated[
    str | None,
    typer.Option(
        help="No recipe: learn text_classification (or classify), token_classification (or tag), regression, multi_label, "
        "question_answering, multiple_choice or image_classification …"
    ),
]
DataFile = Annotated[str | None, typer.Option(help="… from this file, or folder with --format …")]
InitFrom = Annotated[
    str | None, typer.Option("--init-from", metavar="MODEL", help="… starting from this run or checkpoint.")
]
ValidFile = Annotated[str | None, typer.Option(help="Validation examples; by default a tenth of --data.")]
DataFormat = Annotated[str | None, typer.Option(help="How --data is written; by default as its name ends.")]
TextColumn = Annotated[str | None, typer.Option(help="The column of the texts.")]
LabelColumn = Annotated[str | None, typer.Option(help="The column of the labels.")]


def check_renamed(option: str, value: str | None) -> None:
    """Refuses the old name of a value."""
    message = renamed_value_message(option, value)
    if message is not None:
        raise InputError(message)


def check_choice(option: str, value: str, *choices: str) -> Any:
    if value not in choices:
        check_renamed(option, value)
        raise InputError(f"{option} is {' or '.join(choices)}, not '{value}'")
    return value


def check_output_free(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output}: is there already; choose another folder, or remove it first")


def check_device(device: str | None) -> None:
    import torch

    if device is None:
        return
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise InputError(f"--device is cpu or cuda, not '{device}'")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError("--device cuda: this machine has no GPU that torch can use; leave the option out")


def load_model(run: str | Path, device: str | None) -> Any:
    import torch

    from qkv.checkpoints import load

    check_device(device)
    return load(run, device or ("cuda" if torch.cuda.is_available() else "cpu"))
