"""Commands about tokenisers: learn one from text, show how one cuts a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.checkpoints import Output, _free
from qkv.cli.options import Json, one_of
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.text.engine import Framed
    from qkv.text.template import Template
    from qkv.text.tokeniser import Tokeniser

app = typer.Typer(no_args_is_help=True, help="Tokenisers: learn one from text, see how one cuts a text.")

KINDS = ("wordpiece", "byte_bpe", "word_bpe", "unigram")
_TABLES = (".jsonl", ".ndjson", ".json", ".parquet")


@app.command("train")
def train(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Text, .jsonl or .parquet; also .gz and .zst.")],
    size: Annotated[int, typer.Option(help="How many tokens at most, the special ones included.")],
    output: Output,
    family: Annotated[
        str | None, typer.Option(help="For this family: its kind, its special tokens, its template.")
    ] = None,
    kind: Annotated[str | None, typer.Option(help=f"For no family in particular: {', '.join(KINDS)}.")] = None,
    lowercase: Annotated[
        bool | None, typer.Option("--lowercase/--cased", help="By default as the family has it.")
    ] = None,
    field: Annotated[
        str, typer.Option(help="The field of .jsonl, or the column of .parquet, that holds text.")
    ] = "text",
    format: Annotated[
        str | None, typer.Option(help="lines, blank, jsonl or parquet, where a file's name does not tell.")
    ] = None,
) -> None:
    """Learn a vocabulary; the folder that is written serves qkv and transformers alike."""
    from qkv.text.huggingface import write_tokenisers
    from qkv.text.tokeniser import train_tokeniser

    if (family is None) == (kind is None):
        raise InputError("give --family (such as bert) or --kind (such as wordpiece), and not both")
    template = None if family is None else _template(family)
    chosen = one_of("--kind", kind, *KINDS) if template is None else template.kind
    _free(output)
    texts = _texts(files, format, field)
    made = train_tokeniser(chosen, texts, size=size, lowercase=lowercase, template=template)
    write_tokenisers(output, made, made)
    print(f"{output}: {chosen}, {made.size:,} tokens{f', for {family}' if family else ''}")


@app.command("show")
def show(
    name: Annotated[
        str,
        typer.Argument(metavar="MODEL|TOKENIZER", help="A run, a checkpoint, a tokeniser's folder or its JSON file."),
    ],
    text: Annotated[str, typer.Argument(metavar="TEXT")],
    pair: Annotated[str | None, typer.Option(help="A second text.")] = None,
    special: Annotated[bool, typer.Option("--special", help="Read [MASK] and its like in the text as such.")] = False,
    target: Annotated[bool, typer.Option("--target", help="The target's tokeniser, where it is another one.")] = False,
    as_json: Json = False,
) -> None:
    """How a text is cut: each token with its id, the characters that it stands for, and its segment."""
    from qkv.weights.tokenisers import find_tokenisers

    tokeniser = find_tokenisers(name)[int(target)]
    found = tokeniser.frame(text, pair, special=special)
    rows = list(_rows(tokeniser, found, (text, pair or "")))
    if as_json:
        print(json.dumps({"text": text, "pair": pair, "size": tokeniser.size, "tokens": rows}, ensure_ascii=False))
        return
    width = max([5, *(len(str(row["token"])) for row in rows)])
    print(f"{'token':<{width}} {'id':>7}  {'segment':>7}  characters")
    for row in rows:
        place = "" if row["part"] is None else f"{row['begin']}-{row['end']} {row['characters']!r}"
        print(f"{row['token']!s:<{width}} {row['id']:>7}  {row['segment']:>7}  {place}".rstrip())
    unknown = sum(row["id"] == tokeniser.unk for row in rows)
    print(f"{len(rows)} tokens of {tokeniser.size:,}{f', {unknown} unknown' if unknown else ''}")


def _template(family: str) -> Template:
    from qkv import families

    template: Template | None = getattr(families.family(family), "TEMPLATE", None)
    if template is None:
        known = [name for name in families.names() if hasattr(families.family(name), "TEMPLATE")]
        raise InputError(f"--family: '{family}' has no tokeniser of its own; use --kind, or one of {', '.join(known)}")
    return template


def _texts(files: list[str], format: str | None, field: str) -> Iterator[str]:
    """Documents one at a time; where one ends does not matter here, so that plain text is read line by line."""
    from qkv.data.corpus import Corpus

    corpora = [Corpus([file], format=format or _format(file), field=field) for file in files]
    return (document.text for corpus in corpora for document in corpus)


def _format(file: str) -> str | None:
    name = file.lower().removesuffix(".gz").removesuffix(".zst")
    tells = name.endswith(_TABLES) or name.startswith("datasets:") or Path(file).is_dir()
    return None if tells else "lines"


def _rows(tokeniser: Tokeniser, found: Framed, texts: tuple[str, str]) -> Iterator[dict[str, object]]:
    columns = zip(found.ids, found.segments, found.offsets, found.words, found.parts, strict=True)
    for number, segment, (begin, end), word, part in columns:
        yield {
            "token": tokeniser.engine.name(number),
            "id": number,
            "segment": segment,
            "part": part,
            "word": word,
            "begin": None if part is None else begin,
            "end": None if part is None else end,
            "characters": None if part is None else texts[part][begin:end],
        }
