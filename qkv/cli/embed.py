"""`qkv embed`: embeddings of texts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from qkv.cli.help import INPUT, OUTPUT
from qkv.cli.input_stream import (
    Input,
    TakeInputs,
    check_source,
    from_args_or_stdin,
    from_file,
    parse_reader_options,
)
from qkv.cli.options import (
    Delimiter,
    Device,
    Encoding,
    InputFile,
    ModelName,
    OnTooLong,
    ParseSpecialTokens,
    ReaderOptions,
    SubwordPooling,
    TextColumn,
    TextPairColumn,
    Texts,
    check_choice,
    load_model,
)
from qkv.cli.prediction_file import NESTED_SUFFIXES, open_writer
from qkv.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from qkv.checkpoints import ModelBundle

_SUFFIXES = (".npy", ".jsonl", ".csv", ".tsv", ".parquet")
_WINDOW_SIZE = 4096  # texts

_EMBEDDING = "Embedding"
Format = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="Read --file in this format, such as csv or jsonl (docs/data.md), or as lines.",
        show_default="by the suffix of the file and the recipe; .txt is lines",
        rich_help_panel=INPUT,
    ),
]
Pool = Annotated[
    str,
    typer.Option(
        metavar="POOLING",
        help="Pool with the mean of all tokens (mean) or the first token (cls), or give one vector per token or word "
        "(tokens, words).",
        rich_help_panel=_EMBEDDING,
    ),
]
Layers = Annotated[
    str,
    typer.Option(
        metavar="LAYERS",
        help="Use the last layer (last), the sum or concatenation of the last four (sum, concat), or one layer by its "
        "number (0: the embedding).",
        rich_help_panel=_EMBEDDING,
    ),
]
Normalize = Annotated[
    bool, typer.Option("--normalize", help="Scale each vector to length 1.", rich_help_panel=_EMBEDDING)
]
VectorFile = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write a .npy file with one row per text, or a .jsonl, .csv, .tsv or .parquet file with the columns of "
        "the input.",
        show_default="JSON lines on stdout",
        rich_help_panel=OUTPUT,
    ),
]


def embed(
    model: ModelName,
    texts: Texts = None,
    file: InputFile = None,
    format: Format = None,
    text: TextColumn = None,
    text_pair: TextPairColumn = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    reader_option: ReaderOptions = None,
    pool: Pool = "mean",
    layers: Layers = "last",
    normalize: Normalize = False,
    parse_special_tokens: ParseSpecialTokens = False,
    subword_pooling: SubwordPooling = None,
    output: VectorFile = None,
    on_too_long: OnTooLong = "refuse",
    device: Device = None,
) -> None:
    """Compute embeddings of texts with a pretrained model.

    Gives one vector per TEXT argument, row of a table, line of a .txt file or line of stdin.

    Examples:
        qkv embed bert-base-uncased --file sentences.txt --output vectors.npy
        qkv embed runs/sentiment --file reviews.csv --output vectors.csv
    """
    columns = {"text": text, "text_pair": text_pair, "delimiter": delimiter, "encoding": encoding}
    options = {f"--{name.replace('_', '-')}": value for name, value in columns.items()}
    check_source(texts or [], file, {"--format": format, **options, "--reader-option": reader_option})
    _check_output(output, pool)
    if subword_pooling is not None and pool != "words":
        raise InputError("--subword-pooling: is for --pool words; add it, or leave the option out")
    layer = int(layers) if layers.isdecimal() else None
    layer_choice: Literal["last", "sum", "concat"] = check_choice(
        "--layers", layers if layer is None else "last", "last", "sum", "concat"
    )
    settings: dict[str, Any] = {
        "pool": check_choice("--pool", pool, "mean", "cls", "tokens", "words"),
        "layers": layer_choice if layer is None else layer,
        "normalize": normalize,
        "subword_pooling": check_choice("--subword-pooling", subword_pooling or "first", "first", "mean"),
        "on_too_long": check_choice("--on-too-long", on_too_long, "refuse", "truncate"),
        "parse_special_tokens": parse_special_tokens,
    }
    bundle = load_model(model, device)
    take = _open_inputs(bundle, texts or [], file, format, parse_reader_options(reader_option, **columns))
    _write_vectors(_iter_vectors(bundle, take, settings), output)


def _check_output(output: Path | None, pool: str) -> None:
    if output is None:
        return
    if output.suffix not in _SUFFIXES:
        raise InputError(f"--output: {output} should end in {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}")
    if output.suffix not in NESTED_SUFFIXES and pool in ("tokens", "words"):
        raise InputError("--output: texts have unequal numbers of tokens; write .jsonl, or choose --pool mean or cls")


def _open_inputs(
    bundle: ModelBundle, texts: list[str], file: Path | None, format: str | None, columns: dict[str, Any]
) -> TakeInputs:
    from qkv.data.examples import TextExample
    from qkv.data.formats.io import ErrorPolicy
    from qkv.tasks.input_files import input_format
    from qkv.tasks.predictor import recipe_of_bundle

    if file is not None:
        file_format = input_format(file, TextExample, recipe_of_bundle(bundle), format, columns)
        return from_file(file_format, file, ErrorPolicy())
    take = from_args_or_stdin(texts, ErrorPolicy())
    if take is None:
        raise InputError("no text; give TEXT, --file, or - for stdin")
    return take


def _iter_vectors(
    bundle: ModelBundle, take: TakeInputs, settings: dict[str, Any]
) -> Iterator[list[tuple[Input, Tensor]]]:
    """Yield the inputs of each window with their vectors."""
    from qkv.checkpoints.embed import embed as compute_embeddings

    while window := take(_WINDOW_SIZE):
        locations = [item.location for item in window]
        vectors = compute_embeddings(bundle, [_texts(item) for item in window], locations=locations, **settings)
        yield list(zip(window, vectors, strict=True))


def _texts(item: Input) -> str | tuple[str, str]:
    """Return the text or the pair of texts of an input."""
    texts = [item.text] if item.example is None else list(item.example.iter_texts())
    if len(texts) > 2:
        raise InputError(f"{item.location}: has {len(texts)} texts; an embedding takes one text or two")
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])


def _write_vectors(windows: Iterator[list[tuple[Input, Tensor]]], output: Path | None) -> None:
    from qkv.files import atomic_write

    if output is None:
        for window in windows:
            rows = ({"text": item.text, "vector": vector.tolist()} for item, vector in window)
            print("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), flush=True)
    elif output.suffix == ".npy":
        _write_array(output, [vector for window in windows for _, vector in window])
    else:
        nested = output.suffix in NESTED_SUFFIXES

        def write(tmp_path: Path) -> None:
            with contextlib.closing(open_writer(output, tmp_path)) as writer:
                for window in windows:
                    writer.write([_make_row(item, vector, nested) for item, vector in window])

        atomic_write(output, write)


def _make_row(item: Input, vector: Tensor, nested: bool) -> dict[str, Any]:
    """Return the columns of an input and its vector: in one column, or in one per dimension."""
    values = vector.tolist()
    columns = dict(item.row) or {"text": item.text}
    added = {"vector": values} if nested else {f"vector_{i}": value for i, value in enumerate(values, 1)}
    clash = next((name for name in added if name in columns), None)
    if clash is not None:
        raise InputError(f"{item.location}: has a column '{clash}' already, which the vector needs; rename it")
    return columns | added


def _write_array(output: Path, vectors: list[Tensor]) -> None:
    import io

    import numpy as np

    from qkv.files import atomic_write_bytes

    packed = io.BytesIO()
    np.save(packed, np.stack([vector.numpy() for vector in vectors]))
    atomic_write_bytes(output, packed.getvalue())
