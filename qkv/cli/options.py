"""Options that several commands share, and checks of their values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from qkv.cli.help import GENERATION, INPUT, OUTPUT
from qkv.errors import InputError, describe_value
from qkv.limits import limit, raise_hint
from qkv.renamed import renamed_value_message

if TYPE_CHECKING:
    from qkv.checkpoints import ModelBundle

Choice = TypeVar("Choice", bound=str)

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a trained run.")]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Folder of a run or checkpoint, or the name of a model in the Hugging Face cache."
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE", help="Compute on cpu, cuda, cuda:N or mps.", show_default="cuda if a GPU is available"
    ),
]
With = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        metavar="MODEL",
        help="Generate with this model too, as an ensemble of one vocabulary (repeatable).",
        rich_help_panel=GENERATION,
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Print the task and the generation settings in force, with their origin, to stderr.",
        rich_help_panel=OUTPUT,
    ),
]

# Input
Texts = Annotated[
    list[str] | None, typer.Argument(metavar="TEXT", help="Input texts, or - to read one text per line from stdin.")
]
InputFile = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="Read one input per line from this file, or one per example with --format.",
        rich_help_panel=INPUT,
    ),
]
TextColumn = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="Read the text of an example from this column.", rich_help_panel=INPUT),
]
TextPairColumn = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="Read the second text of an example from this column.", rich_help_panel=INPUT),
]
LabelColumn = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="Read the label of an example from this column.", rich_help_panel=INPUT),
]
ReaderOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--reader-option",
        metavar="KEY=VALUE",
        help="Set a column or an option of the format, such as label=stars (repeatable).",
        rich_help_panel=INPUT,
    ),
]


def delimiter_option(panel: str) -> Any:
    """Return the option --delimiter for a panel of the help."""
    sentence = "Split the rows of a CSV file at this character, such as tab or a semicolon."
    return typer.Option(metavar="CHARACTER", help=sentence, show_default="detected", rich_help_panel=panel)


def encoding_option(panel: str) -> Any:
    """Return the option --encoding for a panel of the help."""
    sentence = "Decode the data with this encoding, such as latin-1."
    return typer.Option(metavar="NAME", help=sentence, show_default="detected", rich_help_panel=panel)


Delimiter = Annotated[str | None, delimiter_option(INPUT)]
Encoding = Annotated[str | None, encoding_option(INPUT)]
SkipBad = Annotated[
    bool,
    typer.Option("--skip-bad", help="Skip invalid examples and list them at the end.", rich_help_panel=INPUT),
]
OnTooLong = Annotated[
    str,
    typer.Option(
        metavar="ACTION",
        help="Refuse or truncate inputs that exceed the maximum length of the model.",
        rich_help_panel=INPUT,
    ),
]
ParseSpecialTokens = Annotated[
    bool,
    typer.Option(
        "--parse-special-tokens",
        help="Parse special tokens in a text, such as <extra_id_0>, as tokens.",
        rich_help_panel=INPUT,
    ),
]
SubwordPooling = Annotated[
    str | None,
    typer.Option(
        metavar="POOLING",
        help="Represent a word by its first subword or by the mean of its subwords (first, mean).",
        show_default="first",
        rich_help_panel="Embedding",
    ),
]

OnTooLongOfRecipe = Annotated[
    str | None,
    typer.Option(
        metavar="ACTION",
        help="Refuse or truncate inputs that exceed the maximum length of the model.",
        show_default="as in the recipe",
        rich_help_panel=INPUT,
    ),
]

# Generation
NumBeams = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Search with N beams, where 1 is greedy search.",
        show_default="as in the recipe, or 1",
        rich_help_panel=GENERATION,
    ),
]
LengthPenalty = Annotated[
    float | None,
    typer.Option(
        metavar="ALPHA",
        help="Rank beams by log-probability divided by length to the power of ALPHA.",
        show_default="as in the recipe",
        rich_help_panel=GENERATION,
    ),
]
OnUnknown = Annotated[
    str | None,
    typer.Option(
        metavar="ACTION",
        help="Refuse or replace tokens that are not in the vocabulary.",
        show_default="as in the recipe",
        rich_help_panel=GENERATION,
    ),
]

# Output
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=OUTPUT)]
OutputFolder = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="Write to this folder, which must be new or empty.",
        rich_help_panel=OUTPUT,
    ),
]


def split_models(model: str, with_models: list[str] | None, texts: list[str] | None) -> tuple[list[str], list[str]]:
    """Return the models of a command and its texts: folders of models before the first text belong to the ensemble."""
    models, rest = [model], list(texts or [])
    while rest and _is_model_folder(rest[0]):
        models.append(rest.pop(0))
    return models + (with_models or []), rest


def _is_model_folder(text: str) -> bool:
    from qkv.checkpoints.hf_checkpoint import is_checkpoint
    from qkv.checkpoints.model_folder import SPEC_FILE

    folder = Path(text)
    try:
        return folder.is_dir() and ((folder / SPEC_FILE).is_file() or is_checkpoint(folder))
    except (OSError, ValueError):  # a text that is too long for a path, or has a null character
        return False


def check_renamed(option: str, value: str | None) -> None:
    """Refuse the old name of a value with a message that contains the new name."""
    message = renamed_value_message(option, value)
    if message is not None:
        raise InputError(message)


def check_choice(option: str, value: str, *choices: Choice) -> Choice:
    """Return the choice that a value names; refuse any other value."""
    for choice in choices:
        if value == choice:
            return choice
    check_renamed(option, value)
    *first_choices, last_choice = choices
    alternatives = f"{', '.join(first_choices)} or {last_choice}" if first_choices else last_choice
    raise InputError(f"{option} must be {alternatives}, not '{value}'")


def check_output_free(output: Path) -> None:
    """Refuse to write into a folder that has files already."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output}: already exists; choose another folder, or remove it first")


def check_device(device: str | None) -> None:
    """Refuse a device that is unknown or not available."""
    from qkv.nn.device import find_device

    find_device(device, "--device")


def check_seed(seed: int | None) -> None:
    """Refuse a seed that no random number generator takes."""
    if seed is not None and not 0 <= seed < 2**63:
        raise InputError(f"--seed must be at least 0 and below 2^63, not {describe_value(seed)}")


def check_num_beams(num_beams: int | None) -> None:
    """Refuse a number of beams that is too small or too large."""
    _check_count("--num-beams", num_beams, "beams")


def check_n_best(n_best: int | None) -> None:
    """Refuse a number of alternatives that is too small or too large."""
    _check_count("--n-best", n_best, "beams")


def check_num_workers(num_workers: int | None) -> None:
    """Refuse a number of threads that is negative or too large."""
    _check_count("--num-workers", num_workers, "workers", minimum=0)


def check_vocab_size(vocab_size: int | None) -> None:
    """Refuse a vocabulary size that is too small or too large."""
    _check_count("--vocab-size", vocab_size, "vocabulary")


def _check_count(option: str, count: int | None, limit_name: str, minimum: int = 1) -> None:
    if count is None:
        return
    if count < minimum:
        raise InputError(f"{option} must be {minimum} or more, not {describe_value(count)}")
    if count > limit(limit_name):
        raise InputError(f"{option}: {describe_value(count)} is too large; {raise_hint(limit_name)}")


def load_model(run: str | Path, device: str | None) -> ModelBundle:
    """Load a model onto a device, by default the GPU if there is one."""
    from qkv.checkpoints import load
    from qkv.nn.device import find_device

    return load(run, find_device(device, "--device"))
