"""The command that makes vectors of texts: embed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

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


def embed(
    model: ModelName,
    texts: Texts = None,
    file: InputFile = None,
    pool: Annotated[
        str, typer.Option(help="mean (of all tokens), cls (the first one), tokens (one vector each), words.")
    ] = "mean",
    layers: Annotated[str, typer.Option(help="last; sum or concat of the last four.")] = "last",
    normalize: Annotated[bool, typer.Option("--normalize", help="Vectors of length one.")] = False,
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
    from qkv.generation import embed as compute_embeddings

    if output is not None and output.suffix not in (".npy", ".jsonl"):
        raise InputError(f"--output: {output} should end in .npy or .jsonl")
    if output is not None and output.suffix == ".npy" and pool in ("tokens", "words"):
        raise InputError("--output: texts have unequal numbers of tokens; write .jsonl, or choose --pool mean or cls")
    config = GenerationConfig(
        on_too_long=check_choice("--on-too-long", on_too_long, "refuse", "truncate"),
        subword_pooling=check_choice("--subword-pooling", subword_pooling or "first", "first", "mean"),
        parse_special_tokens=parse_special_tokens,
    )
    items = iter_inputs(texts or [], file, ErrorPolicy())
    if items is None:
        raise InputError("no text was given; name some, or --file, or - for stdin")
    inputs = [(item.text, item.location) for item in items]
    embeddings = compute_embeddings(
        load_model(model, device),
        [text for text, _ in inputs],
        pool=check_choice("--pool", pool, "mean", "cls", "tokens", "words"),
        layers=check_choice("--layers", layers, "last", "sum", "concat"),
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
