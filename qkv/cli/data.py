"""`qkv data`: tokenization of a corpus into shards of token ids."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.help import INPUT, OUTPUT, add_command, make_app
from qkv.cli.options import check_num_workers, check_renamed

if TYPE_CHECKING:
    from qkv.data.corpora.corpus import Corpus
    from qkv.data.corpora.shards import ProgressCallback

Files = Annotated[
    list[str],
    typer.Argument(metavar="FILE", help="Files (also compressed as .gz or .zst), folders, or datasets:NAME[:SPLIT]."),
]
TokenizerName = Annotated[
    str,
    typer.Option(
        "--tokenizer",
        "-t",
        metavar="TOKENIZER",
        help="Use this tokenizer, given by its folder, its JSON file or a model.",
        rich_help_panel=INPUT,
    ),
]
ShardFolder = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="DIR", help="Write the shards to this folder.", rich_help_panel=OUTPUT),
]
Format = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="Read the files as line_per_document, blank_line_separated, file_per_document, jsonl or parquet "
        "(required for .txt).",
        show_default="by the file names",
        rich_help_panel=INPUT,
    ),
]
TextField = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Read the text from this field of .jsonl or column of .parquet and datasets.",
        rich_help_panel=INPUT,
    ),
]
NumWorkers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Read with N threads, in addition to those of the tokenizer.",
        show_default="4, or the number of cores if smaller",
        rich_help_panel="Performance",
    ),
]
ShardTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Write shards of N tokens, which is also the most work that an interruption can lose.",
        show_default="67,108,864",
        rich_help_panel=OUTPUT,
    ),
]


def build(
    files: Files,
    tokenizer: TokenizerName,
    output: ShardFolder,
    format: Format = None,
    text_field: TextField = "text",
    num_workers: NumWorkers = None,
    shard_tokens: ShardTokens = None,
) -> None:
    """Tokenize a corpus into shards of token ids for pretraining.

    A build that was interrupted continues after its last complete shard when the same command is run again.

    Example:
        qkv data build corpus.jsonl --tokenizer bert-base-uncased --output shards
    """
    import os

    from qkv.checkpoints.tokenizers import find_tokenizers
    from qkv.data.corpora.corpus import Corpus
    from qkv.data.corpora.shards import SHARD_TOKENS, build_shards

    check_num_workers(num_workers)
    check_renamed("--format", format)
    corpus_tokenizer, _ = find_tokenizers(tokenizer)
    corpus = Corpus(files, format=format, text_field=text_field)
    with _progress(corpus) as progress:
        shards = build_shards(
            output,
            corpus,
            corpus_tokenizer,
            num_workers=min(4, os.cpu_count() or 1) if num_workers is None else num_workers,
            shard_tokens=SHARD_TOKENS if shard_tokens is None else shard_tokens,
            on_progress=progress,
        )
    summary = f"{len(shards):,} documents, {shards.tokens:,} tokens, {len(shards.meta['shards']):,} shards"
    speed = f"{progress.speed():,.0f} tokens/s" if progress.tokens else "already built"
    print(f"{output}: {summary}; {speed}")


app = make_app("""Prepare corpora for pretraining.

Example:
    qkv data build corpus.jsonl --tokenizer bert-base-uncased --output shards
""")
add_command(app, "build", build)


class _Progress:
    """Progress of this process: tokens since its first callback, without those of an earlier, interrupted one."""

    def __init__(self) -> None:
        self._start: tuple[float, int] | None = None  # time and number of tokens at the first callback
        self.tokens = 0
        self.display: ProgressCallback = lambda documents, tokens: None  # noqa: ARG005

    def __call__(self, documents: int, tokens: int) -> None:
        self._start = self._start or (time.perf_counter(), tokens)
        self.tokens = tokens - self._start[1]
        self.display(documents, tokens)

    def speed(self) -> float:
        """Return the tokens per second."""
        return self.tokens / (time.perf_counter() - self._start[0]) if self._start else 0.0


@contextmanager
def _progress(corpus: Corpus) -> Iterator[_Progress]:
    progress = _Progress()
    if not sys.stderr.isatty():
        yield progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens"),
        BarColumn(),
        TransferSpeedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        # The size of a dataset from the hub is unknown: the bar then shows activity only.
        task = bar.add_task("", total=corpus.size or None, documents=0, tokens=0)
        progress.display = lambda documents, tokens: bar.update(
            task, completed=corpus.bytes_read, documents=documents, tokens=tokens
        )
        yield progress
