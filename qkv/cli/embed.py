"""`qkv embed`: embeddings of texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from qkv.cli.help import OUTPUT
from qkv.cli.input_stream import iter_inputs
from qkv.cli.options import (
    Device,
    InputFile,
    ModelName,
    OnTooLong,
    ParseSpecialTokens,
    SubwordPooling,
    Texts,
    check_choice,
    load_model,
)
from qkv.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


_EMBEDDING = "Embedding"
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
        help="Use the last layer (last), or the sum or concatenation of the last four (sum, concat).",
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
        help="Write a .npy file with one row per text, or a .jsonl file.",
        show_default="JSON lines on stdout",
        rich_help_panel=OUTPUT,
    ),
]


def embed(
    model: ModelName,
    texts: Texts = None,
    file: InputFile = None,
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

    Gives one vector per TEXT argument, line of a file or line of stdin.

    Example:
        qkv embed bert-base-uncased --file sentences.txt --output vectors.npy
    """
    from qkv.checkpoints.embed import embed as compute_embeddings
    from qkv.data.formats.io import ErrorPolicy
    from qkv.files import atomic_write_text

    if output is not None and output.suffix not in (".npy", ".jsonl"):
        raise InputError(f"--output: {output} should end in .npy or .jsonl")
    if output is not None and output.suffix == ".npy" and pool in ("tokens", "words"):
        raise InputError("--output: texts have unequal numbers of tokens; write .jsonl, or choose --pool mean or cls")
    items = iter_inputs(texts or [], file, ErrorPolicy())
    if items is None:
        raise InputError("no text; give TEXT, --file, or - for stdin")
    inputs = [(item.text, item.location) for item in items]
    layer_choice: Literal["last", "sum", "concat"] = check_choice("--layers", layers, "last", "sum", "concat")
    embeddings = compute_embeddings(
        load_model(model, device),
        [text for text, _ in inputs],
        pool=check_choice("--pool", pool, "mean", "cls", "tokens", "words"),
        layers=layer_choice,
        normalize=normalize,
        subword_pooling=check_choice("--subword-pooling", subword_pooling or "first", "first", "mean"),
        on_too_long=check_choice("--on-too-long", on_too_long, "refuse", "truncate"),
        parse_special_tokens=parse_special_tokens,
        locations=[location for _, location in inputs],
    )
    if output is not None and output.suffix == ".npy":
        _write_array(output, embeddings)
        return
    rows = zip(inputs, embeddings, strict=True)
    lines = [json.dumps({"text": text, "vector": vector.tolist()}, ensure_ascii=False) for (text, _), vector in rows]
    if output is None:
        print("\n".join(lines))
    else:
        atomic_write_text(output, "".join(f"{line}\n" for line in lines))


def _write_array(output: Path, vectors: list[Tensor]) -> None:
    import io

    import numpy as np

    from qkv.files import atomic_write_bytes

    packed = io.BytesIO()
    np.save(packed, np.stack([vector.numpy() for vector in vectors]))
    atomic_write_bytes(output, packed.getvalue())
