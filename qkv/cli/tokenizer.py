"""Commands about tokenisers: learn one from text, show how one cuts a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.options import Json, OutputFolder, check_choice, check_output_free, check_renamed
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.tokenization.backend import Encoding
    from qkv.tokenization.template import Template
    from qkv.tokenization.tokenizer import Tokenizer

app = typer.Typer(no_args_is_help=True, help="Tokenisers: learn one from text, see how one cuts a text.")

KINDS = ("wordpiece", "byte_bpe", "word_bpe", "unigram")
_TABLE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")


@app.command("train")
def train(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Text, .jsonl or .parquet; also .gz and .zst.")],
    vocab_size: Annotated[int, typer.Option(help="How many tokens at most, the special ones included.")],
    output: OutputFolder,
    family: Annotated[
        str | None, typer.Option(help="For this family: its kind, its special tokens, its template.")
    ] = None,
    kind: Annotated[str | None, typer.Option(help=f"For no family in particular: {', '.join(KINDS)}.")] = None,
    lowercase: Annotated[
        bool | None, typer.Option("--lowercase/--cased", help="By default as the family has it.")
    ] = None,
    text_field: Annotated[
        str, typer.Option(help="The field of .jsonl, or the column of .parquet, that holds text.")
    ] = "text",
    format: Annotated[
        str | None, typer.Option(help="line_per_document, blank_line_separated, jsonl or parquet, where a file's name does not tell.")
    ] = None,
) -> None:
    """Learn a vocabulary; the folder that is written serves qkv and transformers alike."""
    from qkv.tokenization.hf import save_tokenizers
    from qkv.tokenization.tokenizer import train_tokenizer

    if (family is None) == (kind is None):
        raise InputError("give --family (such as bert) or --kind (such as wordpiece), and not both")
    template = None if family is None else _template(family)
    selected_kind = check_choice("--kind", kind, *KINDS) if template is None else template.kind
    check_output_free(output)
    check_renamed("--format", format)
    texts = _iter_texts(files, format, text_field)
    tokenizer = train_tokenizer(selected_kind, texts, vocab_size=vocab_size, lowercase=lowercase, template=template)
    save_tokenizers(output, tokenizer, tokenizer)
    print(f"{output}: {selected_kind}, {tokenizer.vocab_size:,} tokens{f', for {family}' if family else ''}")


@app.command("show")
def show(
    name: Annotated[
        str,
        typer.Argument(metavar="MODEL|TOKENIZER", help="A run, a checkpoint, a tokeniser's folder or its JSON file."),
    ],
    text: Annotated[str, typer.Argument(metavar="TEXT")],
    text_pair: Annotated[str | None, typer.Option(help="A second text.")] = None,
    parse_special_tokens: Annotated[
        bool, typer.Option("--parse-special-tokens", help="Read [MASK] and its like in the text as such.")
    ] = False,
    target: Annotated[bool, typer.Option("--target", help="The target's tokeniser, where it is another one.")] = False,
    as_json: Json = False,
) -> None:
    """How a text is cut: each token with its id, the characters that it stands for, and its segment (token_type_id)."""
    from qkv.checkpoints.tokenizers import find_tokenizers

    tokenizer = find_tokenizers(name)[int(target)]
    encoding = tokenizer.encode_plus(text, text_pair, parse_special_tokens=parse_special_tokens)
    rows = list(_rows(tokenizer, encoding, (text, text_pair or "")))
    if as_json:
        fields = {"text": text, "text_pair": text_pair, "vocab_size": tokenizer.vocab_size, "tokens": rows}
        print(json.dumps(fields, ensure_ascii=False))
        return
    width = max([5, *(len(str(row["token"])) for row in rows)])
    print(f"{'token':<{width}} {'id':>7}  {'token_type_id':>13}  characters")
    for row in rows:
        characters = "" if row["sequence_id"] is None else f"{row['start']}-{row['end']} {row['characters']!r}"
        print(f"{row['token']!s:<{width}} {row['id']:>7}  {row['token_type_id']:>13}  {characters}".rstrip())
    unknown = sum(row["id"] == tokenizer.unk_id for row in rows)
    print(f"{len(rows)} tokens of {tokenizer.vocab_size:,}{f', {unknown} unknown' if unknown else ''}")


def _template(family: str) -> Template:
    from qkv import families

    template: Template | None = getattr(families.get_family(family), "TOKENIZER_TEMPLATE", None)
    if template is None:
        known = [name for name in families.names() if hasattr(families.get_family(name), "TOKENIZER_TEMPLATE")]
        raise InputError(f"--family: '{family}' has no tokeniser of its own; use --kind, or one of {', '.join(known)}")
    return template


def _iter_texts(files: list[str], format: str | None, text_field: str) -> Iterator[str]:
    """Documents one at a time; where one ends does not matter here, so that plain text is read line by line."""
    from qkv.data.corpora.corpus import Corpus

    corpora = [Corpus([file], format=format or _default_format(file), text_field=text_field) for file in files]
    return (document.text for corpus in corpora for document in corpus)


def _default_format(file: str) -> str | None:
    name = file.lower().removesuffix(".gz").removesuffix(".zst")
    has_own_format = name.endswith(_TABLE_SUFFIXES) or name.startswith("datasets:") or Path(file).is_dir()
    return None if has_own_format else "line_per_document"


def _rows(tokenizer: Tokenizer, encoding: Encoding, texts: tuple[str, str]) -> Iterator[dict[str, object]]:
    columns = zip(
        encoding.ids, encoding.token_type_ids, encoding.offsets, encoding.word_ids, encoding.sequence_ids, strict=True
    )
    for token_id, token_type_id, (start, end), word_id, sequence_id in columns:
        yield {
            "token": tokenizer.backend.id_to_token(token_id),
            "id": token_id,
            "token_type_id": token_type_id,
            "sequence_id": sequence_id,
            "word_id": word_id,
            "start": None if sequence_id is None else start,
            "end": None if sequence_id is None else end,
            "characters": None if sequence_id is None else texts[sequence_id][start:end],
        }
