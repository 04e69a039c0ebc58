"""Commands that use a model: predict, embed."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli.answers import OutputFormat, make_predictor
from qkv.cli.input_stream import (
    Input,
    StreamingPredictor,
    count_lines,
    from_args,
    from_file,
    from_format,
    from_stdin,
    progress_bar,
)
from qkv.cli.options import (
    Device,
    Json,
    LengthPenalty,
    MaxNewTokens,
    ModelName,
    NumBeams,
    OnTooLong,
    OnUnknown,
    check_choice,
    load_model,
)
from qkv.cli.run_task import ReaderOptions, SkipBad, parse_reader_options
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.data.formats.io import ErrorPolicy

Texts = Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Inputs; - reads them from stdin.")]
ParseSpecialTokens = Annotated[
    bool, typer.Option("--special", help="Read special tokens in a text, such as T5's <extra_id_0>, as such.")
]
File = Annotated[Path | None, typer.Option("--file", "-f", help="One input a line, or what --format says.")]
Format = Annotated[str | None, typer.Option(help="Of --file: csv, jsonl, squad, images and so on: docs/tasks.md.")]
TextColumn = Annotated[str | None, typer.Option("--text", metavar="COLUMN", help="Of --format: where the text is.")]
TextPairColumn = Annotated[str | None, typer.Option("--second", metavar="COLUMN", help="Where the second text is.")]
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
    str | None, typer.Option("--too-long", help="An input over the model's length: refuse or truncate.")
]
SubwordPooling = Annotated[
    str | None, typer.Option(help="What stands for a word of several tokens: its first one, or their mean.")
]


def predict(
    model: ModelName,
    texts: Texts = None,
    file: File = None,
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
        "beams": max(num_beams, 1 if sample else n_best) if num_beams == 1 else num_beams,
        "length_penalty": length_penalty,
        "best": n_best,
        "sample": sample,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "limit": max_new_tokens,
        "unknown": check_choice("--unknown", on_unknown, "refuse", "replace"),
        "special": parse_special_tokens,
    }
    task_settings = {"threshold": threshold, "too_long": on_too_long, "word": subword_pooling}  # what a task's recipe has decided
    error_policy = ErrorPolicy(skip_bad)
    reader_options = parse_reader_options(reader_option, text=text, second=text_pair)
    inputs = _iter_inputs(texts or [], file, error_policy, format, reader_options)
    predictor = make_predictor(model, device, generation_options, task_settings, OutputFormat(as_json, n_best > 1 or scores))
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


def embed(
    model: ModelName,
    texts: Texts = None,
    file: File = None,
    pool: Annotated[
        str, typer.Option(help="mean (of all tokens), first ([CLS]), tokens (one vector each), words.")
    ] = "mean",
    layers: Annotated[str, typer.Option(help="last; sum or join of the last four.")] = "last",
    normalize: Annotated[bool, typer.Option("--unit", help="Vectors of length one.")] = False,
    parse_special_tokens: ParseSpecialTokens = False,
    subword_pooling: SubwordPooling = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A .npy file (a row a text) or .jsonl; by default stdout.")
    ] = None,
    on_too_long: OnTooLong = "refuse",
    device: Device = None,
) -> None:
    """Vectors of TEXT, a file or stdin: a pretrained body as a source of features."""
    from qkv.data.formats.io import ErrorPolicy
    from qkv.files import atomic_write_text
    from qkv.generation import GenerationConfig
    from qkv.generation import embed as vectors

    if output is not None and output.suffix not in (".npy", ".jsonl"):
        raise InputError(f"--output: {output} should end in .npy or .jsonl")
    if output is not None and output.suffix == ".npy" and pool in ("tokens", "words"):
        raise InputError("--output: texts have unequal numbers of tokens; write .jsonl, or choose --pool mean or first")
    config = GenerationConfig(
        on_too_long=check_choice("--too-long", on_too_long, "refuse", "truncate"),
        subword_pooling=check_choice("--word", subword_pooling or "first", "first", "mean"),
        parse_special_tokens=parse_special_tokens,
    )
    items = _iter_inputs(texts or [], file, ErrorPolicy())
    if items is None:
        raise InputError("no text was given; name some, or --file, or - for stdin")
    inputs = [(item.text, item.location) for item in items]
    embeddings = vectors(
        load_model(model, device),
        [text for text, _ in inputs],
        pool=check_choice("--pool", pool, "mean", "first", "tokens", "words"),
        layers=check_choice("--layers", layers, "last", "sum", "join"),
        normalize=normalize,
        config=config,
        input_names=[location for _, location in inputs],
    )
    if output is not None and output.suffix == ".npy":
        _write_array(output, embeddings)
        return
    rows = zip(inputs, embeddings, strict=True)
    lines = [json.dumps({"text": text, "vector": v.tolist()}, ensure_ascii=False) for (text, _), v in rows]
    if output is None:
        print("\n".join(lines))
    else:
        atomic_write_text(output, "".join(f"{line}\n" for line in lines))


def _write_array(output: Path, vectors: list[Any]) -> None:
    import io

    import numpy as np

    from qkv.files import atomic_write_bytes

    packed = io.BytesIO()
    np.save(packed, np.stack([vector.numpy() for vector in vectors]))
    atomic_write_bytes(output, packed.getvalue())


def _iter_inputs(
    texts: list[str], file: Path | None, error_policy: ErrorPolicy, format: str | None = None, reader_options: dict[str, Any] | None = None
) -> Iterator[Input] | None:
    """Each input as it comes; None: ask at a prompt."""
    if file is not None and texts:
        raise InputError("give TEXT or --file, not both")
    if file is None and (format is not None or reader_options):
        raise InputError("--format, --text, --second and --column go with --file")
    if reader_options and format is None:
        raise InputError("--text, --second and --column name columns; say what --file is by --format")
    if file is not None:
        return from_file(file, error_policy) if format is None else from_format(format, file, reader_options or {}, error_policy)
    if texts == ["-"] or (not texts and not sys.stdin.isatty()):
        return from_stdin(error_policy)
    return from_args(texts) if texts else None


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
