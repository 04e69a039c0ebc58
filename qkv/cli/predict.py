"""The command that asks a model about texts: predict."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from qkv.cli.answers import OutputFormat, make_predictor
from qkv.cli.input_stream import (
    Input,
    StreamingPredictor,
    count_lines,
    from_args,
    iter_inputs,
    progress_bar,
)
from qkv.cli.options import (
    Device,
    InputFile,
    Json,
    LengthPenalty,
    MaxNewTokens,
    ModelName,
    NumBeams,
    OnUnknown,
    ParseSpecialTokens,
    SubwordPooling,
    Texts,
    check_choice,
)
from qkv.cli.run_task import ReaderOptions, SkipBad, parse_reader_options
from qkv.errors import InputError

Format = Annotated[str | None, typer.Option(help="Of --file: csv, jsonl, squad, images and so on: docs/tasks.md.")]
TextColumn = Annotated[str | None, typer.Option("--text", metavar="COLUMN", help="Of --format: where the text is.")]
TextPairColumn = Annotated[str | None, typer.Option("--text-pair", metavar="COLUMN", help="Where the second text is.")]
NBest = Annotated[int, typer.Option(help="How many outputs an input gets (n-best).")]
Scores = Annotated[
    bool, typer.Option("--scores", help="Also log-probabilities of what is written, probabilities of labels.")
]
Sample = Annotated[bool, typer.Option("--sample", help="Draw outputs instead of searching for the best.")]
Temperature = Annotated[float, typer.Option(help="Under 1 sharpens what is drawn from, over 1 flattens it.")]
TopK = Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens only.")]
TopP = Annotated[float | None, typer.Option(help="Draw from the fewest tokens that hold this probability.")]
Seed = Annotated[int, typer.Option(help="The same seed draws the same outputs.")]
Threshold = Annotated[
    float | None,
    typer.Option(
        help="Several labels: the probability from which one counts. Answers: the score for there being none."
    ),
]
OnTooLongOverride = Annotated[
    str | None, typer.Option("--on-too-long", help="An input over the model's length: refuse or truncate.")
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
    n_best: NBest = 1,
    scores: Scores = False,
    as_json: Json = False,
    num_beams: NumBeams = 1,
    length_penalty: LengthPenalty = 1.0,
    sample: Sample = False,
    temperature: Temperature = 1.0,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = None,
    threshold: Threshold = None,
    on_too_long: OnTooLongOverride = None,
    on_unknown: OnUnknown = "refuse",
    parse_special_tokens: ParseSpecialTokens = False,
    subword_pooling: SubwordPooling = None,
    device: Device = None,
) -> None:
    """What a model's head does with TEXT, a file or stdin, one a line; with none of these, asks for them at a prompt.

    It goes on from the text, translates it, fills its [MASK], classifies it, tags its words. Texts that belong together
    are given with a tab between them: a question and the text that answers it, a text and its choices, two sentences.
    A vision model takes pictures' file names. A file of any length streams through, and what comes out keeps its order.
    """
    from qkv.data.formats.io import ErrorPolicy

    generation_options: dict[str, Any] = {
        "num_beams": max(num_beams, 1 if sample else n_best) if num_beams == 1 else num_beams,
        "length_penalty": length_penalty,
        "n_best": n_best,
        "do_sample": sample,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "on_unknown": check_choice("--on-unknown", on_unknown, "refuse", "replace"),
        "parse_special_tokens": parse_special_tokens,
    }
    # what a task's recipe has decided
    task_settings = {"threshold": threshold, "on_too_long": on_too_long, "subword_pooling": subword_pooling}
    error_policy = ErrorPolicy(skip_bad)
    reader_options = parse_reader_options(reader_option, text=text, text_pair=text_pair)
    inputs = iter_inputs(texts or [], file, error_policy, format, reader_options)
    output_format = OutputFormat(as_json, n_best > 1 or scores)
    predictor = make_predictor(model, device, generation_options, task_settings, output_format)
    if inputs is None:
        _run_interactive(lambda line: predictor(list(from_args([line])), 0)[0])
        return
    _print_stream(StreamingPredictor(predictor, error_policy), inputs, None if format else count_lines(file))
    for line in predictor.warnings():
        print(line, file=sys.stderr)


def _print_stream(stream: StreamingPredictor, inputs: Iterator[Input], total: int | None) -> None:
    """Prints what comes of the inputs as it comes, and on stderr what became of the bad ones."""
    with progress_bar(total) as step:
        for done, lines in stream.iter_lines(inputs):
            if lines:
                print("\n".join(lines), flush=True)
            step(done)
    for line in stream.warnings():
        print(line, file=sys.stderr)


def _run_interactive(predict_lines: Any) -> None:
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
        except InputError as error:  # a slip at the prompt does not end the session
            print(error)
