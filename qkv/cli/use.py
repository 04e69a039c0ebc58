"""Commands that use a model: predict, embed."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli.answers import Shape, answers
from qkv.cli.options import Beams, Device, Json, Limit, ModelName, Penalty, TooLong, Unknown, load_model, one_of
from qkv.cli.streams import Input, Stream, count_lines, from_file, from_format, from_stdin, from_words, progress
from qkv.cli.tasks import Columns, SkipBad, column_names
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.data.tasks.lines import Bad

Texts = Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Inputs; - reads them from stdin.")]
Special = Annotated[
    bool, typer.Option("--special", help="Read special tokens in a text, such as T5's <extra_id_0>, as such.")
]
File = Annotated[Path | None, typer.Option("--file", "-f", help="One input a line, or what --format says.")]
Format = Annotated[str | None, typer.Option(help="Of --file: csv, jsonl, squad, images and so on: docs/tasks.md.")]
TextColumn = Annotated[str | None, typer.Option("--text", metavar="COLUMN", help="Of --format: where the text is.")]
SecondColumn = Annotated[str | None, typer.Option("--second", metavar="COLUMN", help="Where the second text is.")]
Best = Annotated[int, typer.Option(help="How many outputs an input gets (n-best).")]
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
LongInput = Annotated[
    str | None, typer.Option("--too-long", help="An input over the model's length: refuse or truncate.")
]
Word = Annotated[
    str | None, typer.Option(help="What stands for a word of several tokens: its first one, or their mean.")
]


def predict(
    model: ModelName,
    texts: Texts = None,
    file: File = None,
    format: Format = None,
    text: TextColumn = None,
    second: SecondColumn = None,
    column: Columns = None,
    skip_bad: SkipBad = False,
    best: Best = 1,
    scores: Scores = False,
    as_json: Json = False,
    beams: Beams = 1,
    length_penalty: Penalty = 1.0,
    sample: Sample = False,
    temperature: Temperature = 1.0,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = 0,
    limit: Limit = None,
    threshold: Threshold = None,
    too_long: LongInput = None,
    unknown: Unknown = "refuse",
    special: Special = False,
    word: Word = None,
    device: Device = None,
) -> None:
    """What a model's head does with TEXT, a file or stdin, one a line; with none of these, asks for them at a prompt.

    It goes on from the text, translates it, fills its [MASK], classifies it, tags its words. Texts that belong together
    are given with a tab between them: a question and the text that answers it, a text and its choices, two sentences.
    A vision model takes pictures' file names. A file of any length streams through, and what comes out keeps its order.
    """
    from qkv.data.tasks.lines import Bad

    how: dict[str, Any] = {
        "beams": max(beams, 1 if sample else best) if beams == 1 else beams,
        "length_penalty": length_penalty,
        "best": best,
        "sample": sample,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "limit": limit,
        "unknown": one_of("--unknown", unknown, "refuse", "replace"),
        "special": special,
    }
    chosen = {"threshold": threshold, "too_long": too_long, "word": word}  # what a task's recipe has decided
    bad = Bad(skip_bad)
    columns = column_names(column, text=text, second=second)
    inputs = _inputs(texts or [], file, bad, format, columns)
    answer = answers(model, device, how, chosen, Shape(as_json, best > 1 or scores))
    if inputs is None:
        _prompt(lambda line: answer(list(from_words([line])), 0)[0])
        return
    _print_stream(Stream(answer, bad), inputs, None if format else count_lines(file))
    for line in answer.told():
        print(line, file=sys.stderr)


def _print_stream(stream: Stream, inputs: Iterator[Input], total: int | None) -> None:
    """Prints what comes of the inputs as it comes, and on stderr what became of the bad ones."""
    with progress(total) as step:
        for done, lines in stream.lines(inputs):
            if lines:
                print("\n".join(lines), flush=True)
            step(done)
    for line in stream.told():
        print(line, file=sys.stderr)


def embed(
    model: ModelName,
    texts: Texts = None,
    file: File = None,
    pool: Annotated[
        str, typer.Option(help="mean (of all tokens), first ([CLS]), tokens (one vector each), words.")
    ] = "mean",
    layers: Annotated[str, typer.Option(help="last; sum or join of the last four.")] = "last",
    unit: Annotated[bool, typer.Option("--unit", help="Vectors of length one.")] = False,
    special: Special = False,
    word: Word = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A .npy file (a row a text) or .jsonl; by default stdout.")
    ] = None,
    too_long: TooLong = "refuse",
    device: Device = None,
) -> None:
    """Vectors of TEXT, a file or stdin: a pretrained body as a source of features."""
    from qkv.data.tasks.lines import Bad
    from qkv.decode import Decoding
    from qkv.decode import embed as vectors
    from qkv.files import write_text

    if output is not None and output.suffix not in (".npy", ".jsonl"):
        raise InputError(f"--output: {output} should end in .npy or .jsonl")
    if output is not None and output.suffix == ".npy" and pool in ("tokens", "words"):
        raise InputError("--output: texts have unequal numbers of tokens; write .jsonl, or choose --pool mean or first")
    how = Decoding(
        too_long=one_of("--too-long", too_long, "refuse", "truncate"),
        word=one_of("--word", word or "first", "first", "mean"),
        special=special,
    )
    found_inputs = _inputs(texts or [], file, Bad())
    if found_inputs is None:
        raise InputError("no text was given; name some, or --file, or - for stdin")
    inputs = [(one.text, one.where) for one in found_inputs]
    found = vectors(
        load_model(model, device),
        [text for text, _ in inputs],
        pool=one_of("--pool", pool, "mean", "first", "tokens", "words"),
        layers=one_of("--layers", layers, "last", "sum", "join"),
        unit=unit,
        how=how,
        places=[where for _, where in inputs],
    )
    if output is not None and output.suffix == ".npy":
        _write_array(output, found)
        return
    rows = zip(inputs, found, strict=True)
    lines = [json.dumps({"text": text, "vector": v.tolist()}, ensure_ascii=False) for (text, _), v in rows]
    if output is None:
        print("\n".join(lines))
    else:
        write_text(output, "".join(f"{line}\n" for line in lines))


def _write_array(output: Path, vectors: list[Any]) -> None:
    import io

    import numpy as np

    from qkv.files import write_bytes

    packed = io.BytesIO()
    np.save(packed, np.stack([vector.numpy() for vector in vectors]))
    write_bytes(output, packed.getvalue())


def _inputs(
    texts: list[str], file: Path | None, bad: Bad, format: str | None = None, columns: dict[str, Any] | None = None
) -> Iterator[Input] | None:
    """Each input as it comes; None: ask at a prompt."""
    if file is not None and texts:
        raise InputError("give TEXT or --file, not both")
    if file is None and (format is not None or columns):
        raise InputError("--format, --text, --second and --column go with --file")
    if columns and format is None:
        raise InputError("--text, --second and --column name columns; say what --file is by --format")
    if file is not None:
        return from_file(file, bad) if format is None else from_format(format, file, columns or {}, bad)
    if texts == ["-"] or (not texts and not sys.stdin.isatty()):
        return from_stdin(bad)
    return from_words(texts) if texts else None


def _prompt(answer: Any) -> None:
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
            print("\n".join(answer(text)))
        except InputError as error:  # a slip at the prompt does not end the session
            print(error)
