"""`qkv predict`: predictions of a model for texts, files or images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli.help import GENERATION, INPUT, OUTPUT
from qkv.cli.input_stream import check_source, count_lines, from_args_or_stdin, from_file, parse_reader_options
from qkv.cli.options import (
    Delimiter,
    Device,
    Encoding,
    InputFile,
    Json,
    LengthPenalty,
    ModelName,
    NumBeams,
    OnTooLongOfRecipe,
    OnUnknown,
    ParseSpecialTokens,
    ReaderOptions,
    SkipBad,
    TextColumn,
    TextPairColumn,
    Texts,
    check_choice,
    check_device,
    check_n_best,
    check_num_beams,
    check_seed,
)
from qkv.cli.prediction_file import NESTED_SUFFIXES, check_output
from qkv.cli.prediction_output import PredictionOutput, run_interactive
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.cli.input_stream import TakeInputs
    from qkv.data.formats.io import ErrorPolicy
    from qkv.tasks.predictor import Predictor

_TASK = "Other tasks"
Format = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="Read --file in this format, such as csv, jsonl, conll, squad or images (docs/data.md), or as lines.",
        show_default="by the suffix of the file and the recipe; .txt is lines",
        rich_help_panel=INPUT,
    ),
]
PreSplit = Annotated[
    bool,
    typer.Option(
        "--pre-split",
        help="Take the words of a line to be separated by spaces, as in CoNLL files (token_classification).",
        rich_help_panel=INPUT,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write a .csv, .tsv, .jsonl or .parquet file with the columns of the input and the prediction, or a .txt "
        "file with one prediction per line.",
        show_default="stdout",
        rich_help_panel=OUTPUT,
    ),
]
NBest = Annotated[int, typer.Option(metavar="N", help="Print the N best outputs per input.", rich_help_panel=OUTPUT)]
Scores = Annotated[
    bool,
    typer.Option(
        "--scores",
        help="Print log-probabilities of generated texts and probabilities of labels.",
        rich_help_panel=OUTPUT,
    ),
]
Sample = Annotated[
    bool, typer.Option("--sample", help="Sample outputs instead of searching.", rich_help_panel=GENERATION)
]
Temperature = Annotated[
    float | None,
    typer.Option(
        metavar="T",
        help="Divide the logits by T, which sharpens the distribution below 1 and flattens it above (--sample).",
        rich_help_panel=GENERATION,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(metavar="K", help="Sample from the K most probable tokens (--sample).", rich_help_panel=GENERATION),
]
TopP = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        help="Sample from the smallest set of tokens with probability P (--sample).",
        rich_help_panel=GENERATION,
    ),
]
Seed = Annotated[
    int | None, typer.Option(metavar="N", help="Set the random seed (--sample).", rich_help_panel=GENERATION)
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Generate at most N tokens.",
        show_default="twice the input length plus 16",
        rich_help_panel=GENERATION,
    ),
]
GenerationOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--generation",
        metavar="KEY=VALUE",
        help="Set any field of GenerationConfig, such as no_repeat_ngram_size=3 (docs/generation.md, repeatable).",
        rich_help_panel=GENERATION,
    ),
]
Threshold = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Set the minimum probability of a label (multi_label) or the margin of no answer (question_answering).",
        show_default="as in the recipe",
        rich_help_panel=_TASK,
    ),
]
SubwordPooling = Annotated[
    str | None,
    typer.Option(
        metavar="POOLING",
        help="Represent a word by its first subword or by their mean (token_classification).",
        show_default="as in the recipe",
        rich_help_panel=_TASK,
    ),
]


def predict(
    model: ModelName,
    texts: Texts = None,
    file: InputFile = None,
    format: Format = None,
    text: TextColumn = None,
    text_pair: TextPairColumn = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    reader_option: ReaderOptions = None,
    pre_split: PreSplit = False,
    skip_bad: SkipBad = False,
    on_too_long: OnTooLongOfRecipe = None,
    output: Output = None,
    n_best: NBest = 1,
    scores: Scores = False,
    as_json: Json = False,
    num_beams: NumBeams = None,
    length_penalty: LengthPenalty = None,
    sample: Sample = False,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    max_new_tokens: MaxNewTokens = None,
    generation: GenerationOptions = None,
    on_unknown: OnUnknown = None,
    parse_special_tokens: ParseSpecialTokens = False,
    threshold: Threshold = None,
    subword_pooling: SubwordPooling = None,
    device: Device = None,
) -> None:
    """Predict labels, answers or text for inputs.

    Inputs are TEXT arguments, a file or lines of stdin; without any, they are read at an interactive prompt.
    A run uses the task and settings of its recipe, any other model the task of its head. Separate the texts of one
    input by tabs (question and context, text and choices). Image models read file names. Files are streamed in order.
    A table is read by its columns, by default those of the run's training data; a .txt file has one text per line.

    Examples:
        qkv predict bert-base-uncased "Paris is the [MASK] of France." --n-best 3
        qkv predict runs/sentiment --file reviews.csv --output predictions.csv
    """
    from qkv.data.formats.io import ErrorPolicy

    settings: dict[str, Any] = {
        "num_beams": num_beams,
        "length_penalty": length_penalty,
        "do_sample": sample or None,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "on_unknown": on_unknown,
        "parse_special_tokens": parse_special_tokens or None,
        "threshold": threshold,
        "on_too_long": on_too_long,
        "subword_pooling": subword_pooling,
        "pre_split": pre_split or None,
    }
    columns = {"text": text, "text_pair": text_pair, "delimiter": delimiter, "encoding": encoding}
    options = {f"--{name.replace('_', '-')}": value for name, value in columns.items()}
    check_source(texts or [], file, {"--format": format, **options, "--reader-option": reader_option})
    check_seed(seed)
    check_num_beams(num_beams)
    check_n_best(n_best)
    _check_output_options(output, file, n_best, as_json=as_json, scores=scores)
    reader_options = parse_reader_options(reader_option, **columns)
    error_policy = ErrorPolicy(skip_bad)
    predictor = _load_predictor(model, device, settings, n_best)
    if generation:
        predictor = _with_generation_options(predictor, generation)
    if n_best > 1 and not predictor.task.has_alternatives:
        raise InputError(f"--n-best: the task '{predictor.task.name}' has one output per input; leave it out")
    if file is None:
        take = from_args_or_stdin(texts or [], error_policy)
    else:
        take = open_file(file, predictor, format, reader_options, error_policy)
    predictions = PredictionOutput(predictor, n_best, as_json=as_json, with_scores=n_best > 1 or scores)
    if take is None:
        _run_prompt(predictions, output, skip_bad)
    else:
        predictions.run(take, error_policy, count_lines(file), output)


def open_file(
    file: Path, predictor: Predictor, format: str | None, columns: dict[str, Any], error_policy: ErrorPolicy
) -> TakeInputs:
    """Return the inputs of a file, read as the options, the recipe of the model's run or the file name determine."""
    from qkv.tasks.input_files import input_format

    task_type = predictor.task.example_type
    return from_file(input_format(file, task_type, predictor.recipe, format, columns), file, error_policy)


def _run_prompt(predictions: PredictionOutput, output: Path | None, skip_bad: bool) -> None:
    if output is not None or skip_bad:
        raise InputError(f"{'--output' if output else '--skip-bad'} needs inputs: TEXT, --file, or - for stdin")
    run_interactive(predictions.lines)


def _check_output_options(output: Path | None, file: Path | None, n_best: int, *, as_json: bool, scores: bool) -> None:
    """Refuse options of the output that exclude each other or that have no effect."""
    if output is None:
        if as_json and scores:
            raise InputError("--scores: JSON has the scores; leave out --scores or --json")
        return
    check_output(output, file)
    if as_json or scores:
        raise InputError(
            f"--{'json' if as_json else 'scores'} is for stdout; the suffix of --output decides, leave it out"
        )
    if n_best > 1 and output.suffix.lower() not in NESTED_SUFFIXES:
        raise InputError(f"--n-best: {output.suffix} has one prediction per row; write .jsonl or .parquet")


def _with_generation_options(predictor: Predictor, options: list[str]) -> Predictor:
    """Return a predictor with fields of `GenerationConfig` that are given as KEY=VALUE."""
    from qkv.generation.config import parse_options

    if predictor.task.name != "generation":
        raise InputError(f"--generation: the task '{predictor.task.name}' generates no text; leave it out")
    return predictor.with_settings(**parse_options(options, "--generation"))


def _load_predictor(model: str, device: str | None, settings: dict[str, Any], n_best: int) -> Predictor:
    """Load a model with the settings of the command line; those that are None stay as the model has them."""
    from qkv.tasks.predictor import Predictor

    choices = {
        "on_unknown": ("refuse", "replace"),
        "on_too_long": ("refuse", "truncate", "windows"),
        "subword_pooling": ("first", "mean", "all"),
    }
    for name, allowed in choices.items():
        if settings[name] is not None:
            check_choice(f"--{name.replace('_', '-')}", settings[name], *allowed)
    if device is not None:
        check_device(device)
    predictor = Predictor.load(model, device).with_settings(**settings)
    has_beams = n_best > 1  # then --length-penalty ranks them
    predictor.check_used(
        [name for name, value in settings.items() if value is not None and not (has_beams and name == "length_penalty")]
    )
    return predictor
