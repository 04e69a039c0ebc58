"""`qkv tokenizer`: train a tokenizer, and show how one tokenizes a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.help import INPUT, add_command, make_app
from qkv.cli.options import (
    Json,
    OutputFolder,
    ParseSpecialTokens,
    check_choice,
    check_output_free,
    check_renamed,
    check_vocab_size,
)
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.tokenization.backend import Encoding
    from qkv.tokenization.template import Template
    from qkv.tokenization.tokenizer import Tokenizer

KINDS = ("wordpiece", "byte_bpe", "word_bpe", "unigram", "word", "spelled_word")
_TABLE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
_TOKENIZER = "Tokenizer"
Files = Annotated[
    list[str],
    typer.Argument(metavar="FILE", help="Files of text (.txt, .jsonl or .parquet, also compressed as .gz or .zst)."),
]
VocabSize = Annotated[
    int,
    typer.Option(metavar="N", help="Learn at most N tokens, including the special ones.", rich_help_panel=_TOKENIZER),
]
Family = Annotated[
    str | None,
    typer.Option(
        metavar="FAMILY",
        help="Use the kind, special tokens and template of this model family, such as bert.",
        rich_help_panel=_TOKENIZER,
    ),
]
Kind = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help=f"Train a tokenizer of this kind for no particular family ({', '.join(KINDS)}).",
        rich_help_panel=_TOKENIZER,
    ),
]
Lowercase = Annotated[
    bool | None,
    typer.Option(
        "--lowercase/--cased",
        help="Convert text to lower case, or keep its case.",
        show_default="as in the family",
        rich_help_panel=_TOKENIZER,
    ),
]
TextField = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Read the text from this field of .jsonl or column of .parquet.", rich_help_panel=INPUT
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="Read the files as line_per_document, blank_line_separated, jsonl or parquet.",
        show_default="by the file name",
        rich_help_panel=INPUT,
    ),
]


def train(
    files: Files,
    vocab_size: VocabSize,
    output: OutputFolder,
    family: Family = None,
    kind: Kind = None,
    lowercase: Lowercase = None,
    text_field: TextField = "text",
    format: Format = None,
) -> None:
    """Train a tokenizer on text and save it in the Hugging Face format.

    Examples:
        qkv tokenizer train corpus.txt --vocab-size 30000 --family bert -o out
        qkv tokenizer train corpus.jsonl --vocab-size 8000 --kind unigram -o out
    """
    from qkv.tokenization.hf import save_tokenizers
    from qkv.tokenization.tokenizer import train_tokenizer

    check_vocab_size(vocab_size)
    if (family is None) == (kind is None):
        raise InputError("give --family (such as bert) or --kind (such as wordpiece), and not both")
    template = None if family is None else _template(family)
    selected_kind = check_choice("--kind", kind or "", *KINDS) if template is None else template.kind
    check_output_free(output)
    check_renamed("--format", format)
    texts = _iter_texts(files, format, text_field)
    tokenizer = train_tokenizer(selected_kind, texts, vocab_size=vocab_size, lowercase=lowercase, template=template)
    save_tokenizers(output, tokenizer, tokenizer)
    print(f"{output}: {selected_kind}, {tokenizer.vocab_size:,} tokens{f', for {family}' if family else ''}")


def show(
    name: Annotated[
        str,
        typer.Argument(metavar="MODEL|TOKENIZER", help="Model, or folder or JSON file of a tokenizer."),
    ],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Text to tokenize.")],
    text_pair: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Tokenize this text as the second one of a pair.", rich_help_panel=INPUT),
    ] = None,
    parse_special_tokens: ParseSpecialTokens = False,
    target: Annotated[
        bool,
        typer.Option("--target", help="Use the target tokenizer of a model that has two.", rich_help_panel=_TOKENIZER),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the tokens of a text with their ids, character spans and segments (token_type_id).

    Example:
        qkv tokenizer show bert-base-uncased "Attention is all you need."
    """
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


app = make_app("""Train a tokenizer, or show the tokens of a text.

Examples:
    qkv tokenizer train corpus.txt --vocab-size 30000 --family bert -o out
    qkv tokenizer show out "Attention is all you need."
""")
add_command(app, "train", train)
add_command(app, "show", show)


def _template(family: str) -> Template:
    from qkv import families

    template: Template | None = getattr(families.get_family(family), "TOKENIZER_TEMPLATE", None)
    if template is None:
        known = [name for name in families.names() if hasattr(families.get_family(name), "TOKENIZER_TEMPLATE")]
        raise InputError(f"--family: '{family}' has no tokenizer template; use --kind, or one of {', '.join(known)}")
    return template


def _iter_texts(files: list[str], format: str | None, text_field: str) -> Iterator[str]:
    """Iterate over the texts of all files; plain text is read by lines, since document ends do not matter here."""
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
