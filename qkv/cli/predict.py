"""`qkv predict`: predictions of a model for texts, files or images."""

from __future__ import annotations

import sys
from functools import partial
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
    Verbose,
    With,
    check_choice,
    check_device,
    check_n_best,
    check_num_beams,
    check_seed,
    split_models,
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
Alignments = Annotated[
    bool,
    typer.Option(
        "--alignments",
        help="Print the source token that each generated token attends to most, as 0-0 2-1 (source-target).",
        rich_help_panel=OUTPUT,
    ),
]
Stream = Annotated[
    bool,
    typer.Option(
        "--stream",
        help="Print generated text piece by piece as it is made (that of a beam search at its end).",
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
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE",
        help="Generate with weights of this numeric type: float32, bf16 (GPU) or int8 (CPU; prints what it changes).",
        show_default="float32 on a CPU, bf16 on a GPU",
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
    alignments: Alignments = False,
    stream: Stream = False,
    as_json: Json = False,
    num_beams: NumBeams = None,
    length_penalty: LengthPenalty = None,
    sample: Sample = False,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    max_new_tokens: MaxNewTokens = None,
    dtype: Dtype = None,
    generation: GenerationOptions = None,
    on_unknown: OnUnknown = None,
    parse_special_tokens: ParseSpecialTokens = False,
    threshold: Threshold = None,
    subword_pooling: SubwordPooling = None,
    with_: With = None,
    verbose: Verbose = False,
    device: Device = None,
) -> None:
    """Predict labels, answers or text for inputs.

    Inputs are TEXT arguments, a file or lines of stdin; without any, they are read at an interactive prompt.
    A run uses the task and settings of its recipe, any other model the task of its head. Separate the texts of one
    input by tabs (question and context, text and choices). Image models read file names. Files are streamed in order.
    A table is read by its columns, by default those of the run's training data; a .txt file has one text per line.
    Several models before the first TEXT generate together, as an ensemble.

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
        "dtype": dtype,
        "on_unknown": on_unknown,
        "parse_special_tokens": parse_special_tokens or None,
        "threshold": threshold,
        "on_too_long": on_too_long,
        "subword_pooling": subword_pooling,
        "pre_split": pre_split or None,
    }
    columns = {"text": text, "text_pair": text_pair, "delimiter": delimiter, "encoding": encoding}
    options = {f"--{name.replace('_', '-')}": value for name, value in columns.items()}
    models, texts = split_models(model, with_, texts)
    check_source(texts, file, {"--format": format, **options, "--reader-option": reader_option})
    check_seed(seed)
    check_num_beams(num_beams)
    fields = _parse_generation(generation, settings | {"n_best": n_best if n_best > 1 else None})
    n_best = fields.pop("n_best", n_best)
    check_n_best(n_best)
    _check_output_options(output, file, n_best, as_json=as_json, scores=scores)
    if stream:
        others = {"--output": output, "--json": as_json, "--scores": scores, "--alignments": alignments}
        _check_stream(others | {"--n-best": n_best > 1})
    reader_options = parse_reader_options(reader_option, **columns)
    error_policy = ErrorPolicy(skip_bad)
    predictor = _load_predictor(models, device, settings, fields, n_best)
    if alignments:
        _require_generation(predictor, "--alignments")
        predictor = predictor.with_settings(return_alignments=True)
    if n_best > 1 and not predictor.task.has_alternatives:
        raise InputError(f"--n-best: the task '{predictor.task.name}' has one output per input; leave it out")
    if file is None:
        take = from_args_or_stdin(texts, error_policy)
    else:
        take = open_file(file, predictor, format, reader_options, error_policy)
    if verbose:
        print(predictor.describe_settings(n_best), file=sys.stderr)
    predictions = PredictionOutput(predictor, n_best, as_json=as_json, with_scores=n_best > 1 or scores)
    if stream:
        _require_generation(predictor, "--stream")
    if take is None:
        _run_prompt(predictions, output, skip_bad, stream)
    elif stream:
        predictions.print_pieces(take, error_policy)
    else:
        predictions.run(take, error_policy, count_lines(file), output, read_ahead=file is not None)


def open_file(
    file: Path, predictor: Predictor, format: str | None, columns: dict[str, Any], error_policy: ErrorPolicy
) -> TakeInputs:
    """Return the inputs of a file, read as the options, the recipe of the model's run or the file name determine."""
    from qkv.tasks.input_files import input_format

    task_type = predictor.task.example_type
    return from_file(input_format(file, task_type, predictor.recipe, format, columns), file, error_policy)


def _run_prompt(predictions: PredictionOutput, output: Path | None, skip_bad: bool, stream: bool) -> None:
    if output is not None or skip_bad:
        raise InputError(f"{'--output' if output else '--skip-bad'} needs inputs: TEXT, --file, or - for stdin")
    run_interactive(partial(predictions.print_text, stream=stream))


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


def _require_generation(predictor: Predictor, option: str) -> None:
    if predictor.task.name != "generation":
        raise InputError(f"{option}: the task '{predictor.task.name}' generates no text; leave it out")


def _check_stream(options: dict[str, Any]) -> None:
    for option, value in options.items():
        if value:
            raise InputError(
                f"{option}: --stream prints texts as they are made, and nothing else; leave out one of them"
            )


def _parse_generation(options: list[str] | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `GenerationConfig` that are given as KEY=VALUE; they may not contradict other options."""
    if not options:
        return {}
    from qkv.generation.config import parse_options
    from qkv.tasks.base import option_name

    fields = parse_options(options, "--generation")
    for name, value in fields.items():
        if settings.get(name) not in (None, value):
            raise InputError(
                f"--generation {name}={value}: {option_name(name)} has another value; leave out one of them"
            )
    return fields


def _load_predictor(
    models: list[str], device: str | None, settings: dict[str, Any], fields: dict[str, Any], n_best: int
) -> Predictor:
    """Load a model with settings of the command line and fields of `GenerationConfig`; None is what the model has."""
    from qkv.tasks.generation import BEAM_SETTINGS
    from qkv.tasks.predictor import Predictor

    choices = {
        "on_unknown": ("refuse", "replace"),
        "on_too_long": ("refuse", "truncate", "windows"),
        "subword_pooling": ("first", "mean", "all"),
        "dtype": ("float32", "bf16", "int8"),
    }
    for name, allowed in choices.items():
        if settings[name] is not None:
            check_choice(f"--{name.replace('_', '-')}", settings[name], *allowed)
    if device is not None:
        check_device(device)
    predictor = Predictor.load(models[0], device)
    if len(models) > 1:
        _require_generation(predictor, "--with")
        members = [predictor, *(Predictor.load(model, device) for model in models[1:])]
        predictor = Predictor.ensemble(members, names=models)
    if fields:
        _require_generation(predictor, "--generation")
    settings = settings | fields
    predictor = predictor.with_settings(**settings)
    ranking = BEAM_SETTINGS if n_best > 1 and not settings["do_sample"] else ()  # --n-best has beams
    predictor.check_used([name for name, value in settings.items() if value is not None and name not in ranking])
    return predictor
