"""`qkv predict`: predictions of a model for texts, files or images."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli.help import GENERATION, INPUT, OUTPUT
from qkv.cli.input_stream import (
    Input,
    StreamingPredictor,
    count_lines,
    from_args,
    iter_inputs,
    parse_reader_options,
    progress_bar,
)
from qkv.cli.options import (
    Device,
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
    Texts,
    check_choice,
    check_device,
)
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.data.formats.io import ErrorPolicy
    from qkv.tasks.predictions import TaskPrediction
    from qkv.tasks.predictor import Predictor

_TASK = "Other tasks"
Format = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="Read --file in this format, such as csv, jsonl, squad or images (docs/tasks.md lists all).",
        show_default="one text per line",
        rich_help_panel=INPUT,
    ),
]
TextColumn = Annotated[
    str | None,
    typer.Option(
        "--text", metavar="COLUMN", help="Read the text from this column, with --format.", rich_help_panel=INPUT
    ),
]
TextPairColumn = Annotated[
    str | None,
    typer.Option(
        "--text-pair",
        metavar="COLUMN",
        help="Read the second text from this column, with --format.",
        rich_help_panel=INPUT,
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
    reader_option: ReaderOptions = None,
    skip_bad: SkipBad = False,
    on_too_long: OnTooLongOfRecipe = None,
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
    on_unknown: OnUnknown = None,
    parse_special_tokens: ParseSpecialTokens = False,
    threshold: Threshold = None,
    subword_pooling: SubwordPooling = None,
    device: Device = None,
) -> None:
    """Predict labels, answers or text for inputs.

    Inputs are TEXT arguments, lines of a file or of stdin; without any, they are read at an interactive prompt.
    A run uses the task and settings of its recipe, any other model the task of its head. Separate the texts of one
    input by tabs (question and context, text and choices). Image models read file names. Files are streamed in order.

    Examples:
        qkv predict bert-base-uncased "Paris is the [MASK] of France." --n-best 3
        qkv predict runs/sentiment --file reviews.csv --format csv --json
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
    }
    error_policy = ErrorPolicy(skip_bad)
    reader_options = parse_reader_options(reader_option, text=text, text_pair=text_pair)
    inputs = iter_inputs(texts or [], file, error_policy, format, reader_options)
    predictor = _load_predictor(model, device, settings)
    printer = PredictionPrinter(predictor, n_best, as_json=as_json, with_scores=n_best > 1 or scores)
    _print_all(printer, inputs, error_policy, None if format else file)


def _load_predictor(model: str, device: str | None, settings: dict[str, Any]) -> Predictor:
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
    return Predictor.load(model, device).with_settings(**settings)


def _print_all(
    printer: PredictionPrinter, inputs: Iterator[Input] | None, error_policy: ErrorPolicy, file: Path | None
) -> None:
    """Print the predictions of all inputs, or of lines that are typed at a prompt, and warnings on stderr."""
    if inputs is None:
        _run_interactive(lambda line: printer(list(from_args([line])), 0)[0])
        return
    _print_stream(StreamingPredictor(printer, error_policy), inputs, count_lines(file))
    for line in printer.warnings():
        print(line, file=sys.stderr)


class PredictionPrinter:
    """Predictions of inputs as lines of output."""

    def __init__(self, predictor: Predictor, n_best: int, *, as_json: bool, with_scores: bool) -> None:
        self._predictor, self._n_best, self._as_json, self._with_scores = predictor, n_best, as_json, with_scores
        self._num_truncated = 0

    def __call__(self, inputs: Sequence[Input], first_index: int) -> list[list[str]]:
        """Return the output lines of each input."""
        values = [item.text if item.example is None else item.example for item in inputs]
        locations = [item.location for item in inputs]
        predictions = self._predictor(values, self._n_best, locations, first_index)
        self._num_truncated += sum(prediction.truncated for prediction in predictions)
        return [self._format_lines(item, prediction) for item, prediction in zip(inputs, predictions, strict=True)]

    def _format_lines(self, item: Input, prediction: TaskPrediction) -> list[str]:
        if self._as_json:
            return [json.dumps(item.fields | prediction.fields, ensure_ascii=False)]
        if not self._with_scores:
            return [_one_line(prediction.text)]
        alternatives = prediction.alternatives or ((prediction.text, prediction.score or 0.0),)
        return [f"{_one_line(item.text)}\t{score:.4f}\t{_one_line(output)}" for output, score in alternatives]

    def warnings(self) -> list[str]:
        """Return the warnings to print after all predictions."""
        subject = "1 text was" if self._num_truncated == 1 else f"{self._num_truncated:,} texts were"
        return [f"{subject} truncated to the model's maximum length"] if self._num_truncated else []


def _one_line(text: str) -> str:
    """Replace tabs and line ends, which separate the columns and rows of the output."""
    return " ".join(text.split()) if any(char in text for char in "\t\n\r") else text


def _print_stream(stream: StreamingPredictor, inputs: Iterator[Input], total: int | None) -> None:
    """Print predictions as they are made, and on stderr the inputs that were skipped."""
    with progress_bar(total) as step:
        for done, lines in stream.iter_lines(inputs):
            if lines:
                print("\n".join(lines), flush=True)
            step(done)
    for line in stream.warnings():
        print(line, file=sys.stderr)


def _run_interactive(predict_lines: Callable[[str], list[str]]) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives the prompt history and editing
    print("Type a text and press Enter; an empty line ends.")
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not text:
            return
        try:
            print("\n".join(predict_lines(text)))
        except InputError as error:  # an invalid line does not end the session
            print(error)
