"""Commands that use a model: predict, embed."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from qkv.cli.options import Beams, Device, Json, Limit, ModelName, Penalty, TooLong, Unknown, load_model, one_of
from qkv.errors import InputError

Texts = Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Inputs; - reads them from stdin.")]
Special = Annotated[
    bool, typer.Option("--special", help="Read special tokens in a text, such as T5's <extra_id_0>, as such.")
]
File = Annotated[Path | None, typer.Option("--file", "-f", help="One input a line.")]
Word = Annotated[str, typer.Option(help="What stands for a word of several tokens: its first one, or their mean.")]


def predict(
    model: ModelName,
    texts: Texts = None,
    file: File = None,
    best: Annotated[int, typer.Option(help="How many outputs an input gets (n-best).")] = 1,
    scores: Annotated[
        bool, typer.Option("--scores", help="Also log-probabilities of what is written, probabilities of labels.")
    ] = False,
    as_json: Json = False,
    beams: Beams = 1,
    length_penalty: Penalty = 1.0,
    sample: Annotated[bool, typer.Option("--sample", help="Draw outputs instead of searching for the best.")] = False,
    temperature: Annotated[float, typer.Option(help="Under 1 sharpens what is drawn from, over 1 flattens it.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens only.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the fewest tokens that hold this probability.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same outputs.")] = 0,
    limit: Limit = None,
    too_long: TooLong = "refuse",
    unknown: Unknown = "refuse",
    special: Special = False,
    word: Word = "first",
    device: Device = None,
) -> None:
    """What a model's head does with TEXT, a file or stdin, one a line; with none of these, asks for them at a prompt.

    It goes on from the text, translates it, fills its [MASK], classifies it, tags its words. Texts that belong together
    are given with a tab between them: a question and the text that answers it, a text and its choices, two sentences.
    A vision model takes pictures' file names.
    """
    from qkv.decode import Decoding
    from qkv.decode import predict as outputs

    how = Decoding(
        beams=max(beams, 1 if sample else best) if beams == 1 else beams,
        length_penalty=length_penalty,
        best=best,
        sample=sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        limit=limit,
        too_long=one_of("--too-long", too_long, "refuse", "truncate"),
        unknown=one_of("--unknown", unknown, "refuse", "replace"),
        word=one_of("--word", word, "first", "mean"),
        special=special,
    )
    inputs = _inputs(texts or [], file)
    loaded = load_model(model, device)
    show = _Lines(as_json, best > 1 or scores, loaded.model.spec)
    if inputs is None:
        _prompt(lambda text: show(text, outputs(loaded, [show.given(text)], how)[0]))
        return
    found = outputs(loaded, [show.given(text) for text, _ in inputs], how, [where for _, where in inputs])
    for (text, _), predictions in zip(inputs, found, strict=True):
        print("\n".join(show(text, predictions)))


@dataclass(frozen=True)
class _Lines:
    """How a model's inputs are read from lines, and its predictions printed."""

    as_json: bool
    scored: bool
    spec: Any

    @property
    def judges(self) -> bool:
        """It writes nothing of its own: the chance of what it says is worth reading as a probability."""
        return self.spec.decoder is None or (self.spec.head is not None and self.spec.head.kind != "lm")

    @property
    def measures(self) -> bool:
        """What it says is a number, not a chance."""
        head = self.spec.head
        return head is not None and head.kind == "sequence" and head.outputs == 1

    def given(self, text: str) -> str | tuple[str, ...]:
        """A text, or those that belong together."""
        return tuple(text.split("\t")) if self.judges and "\t" in text else text

    def __call__(self, text: str, found: list[Any]) -> list[str]:
        if self.as_json:
            return [json.dumps({"input": text, "predictions": [asdict(p) for p in found]}, ensure_ascii=False)]
        if not self.scored:
            return [p.text for p in found]
        return [f"{text}\t{self._score(p.score)}\t{p.text}" for p in found]

    def _score(self, score: float) -> str:
        return f"{math.exp(score) if self.judges and not self.measures else score:.4f}"


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
    word: Word = "first",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A .npy file (a row a text) or .jsonl; by default stdout.")
    ] = None,
    too_long: TooLong = "refuse",
    device: Device = None,
) -> None:
    """Vectors of TEXT, a file or stdin: a pretrained body as a source of features."""
    from qkv.decode import Decoding
    from qkv.decode import embed as vectors
    from qkv.files import write_text

    if output is not None and output.suffix not in (".npy", ".jsonl"):
        raise InputError(f"--output: {output} should end in .npy or .jsonl")
    if output is not None and output.suffix == ".npy" and pool in ("tokens", "words"):
        raise InputError("--output: texts have unequal numbers of tokens; write .jsonl, or choose --pool mean or first")
    how = Decoding(
        too_long=one_of("--too-long", too_long, "refuse", "truncate"),
        word=one_of("--word", word, "first", "mean"),
        special=special,
    )
    inputs = _inputs(texts or [], file)
    if inputs is None:
        raise InputError("no text was given; name some, or --file, or - for stdin")
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


def _inputs(texts: list[str], file: Path | None) -> list[tuple[str, str]] | None:
    """Each input with its place; None: ask at a prompt."""
    from qkv.data.readers import read_sources
    from qkv.decode.frames import place_of

    if file is not None and texts:
        raise InputError("give TEXT or --file, not both")
    if file is not None:
        return read_sources(str(file))
    if texts == ["-"] or (not texts and not sys.stdin.isatty()):
        lines = sys.stdin.read().removesuffix("\n").split("\n")
        return [(line.removesuffix("\r"), f"stdin:{number}") for number, line in enumerate(lines, 1)]
    return [(text, place_of(text)) for text in texts] if texts else None


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
