"""Commands about corpora: text into shards of ids."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.options import check_renamed
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.data.corpora.corpus import Corpus
    from qkv.data.corpora.shards import ProgressCallback

app = typer.Typer(no_args_is_help=True, help="Corpora for pretraining.")


@app.command()
def build(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Files (also .gz, .zst), folders, or datasets:NAME[:SPLIT].")
    ],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", "-t", help="A tokeniser's folder or JSON file, or a model that has one.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    format: Annotated[
        str | None,
        typer.Option(
            help="line_per_document, blank_line_separated, file_per_document, "
            "jsonl or parquet; by default as the names end, but a .txt needs to be told."
        ),
    ] = None,
    text_field: Annotated[str, typer.Option(help="Where the text is, in jsonl, parquet and datasets.")] = "text",
    num_workers: Annotated[
        int | None, typer.Option(help="Threads beside the tokeniser's own; by default 4, or one for each core.")
    ] = None,
    shard_tokens: Annotated[int | None, typer.Option(help="Tokens of a shard; what a kill costs at most.")] = None,
) -> None:
    """Cut text into ids, once and for all. Kill it at any moment: the same command goes on after the last shard."""
    import os

    from qkv.checkpoints.tokenizers import find_tokenizers
    from qkv.data.corpora.corpus import Corpus
    from qkv.data.corpora.shards import SHARD_TOKENS, build_shards

    if num_workers is not None and num_workers < 0:
        raise InputError(f"--num-workers is {num_workers}; use 0 or more")
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
    speed = f"{progress.speed():,.0f} tokens/s" if progress.tokens else "built before"
    print(f"{output}: {summary}; {speed}")


class _Progress:
    """Counts what this command itself has done, since its first word, and shows it."""

    def __init__(self) -> None:
        self._start: tuple[float, int] | None = None  # when, and the tokens that were there before
        self.tokens = 0
        self.display: ProgressCallback = lambda documents, tokens: None  # noqa: ARG005

    def __call__(self, documents: int, tokens: int) -> None:
        self._start = self._start or (time.perf_counter(), tokens)
        self.tokens = tokens - self._start[1]
        self.display(documents, tokens)

    def speed(self) -> float:
        """Tokens a second."""
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
        # A dataset's size is not known: then the bar only moves.
        task = bar.add_task("", total=corpus.size or None, documents=0, tokens=0)
        progress.display = lambda documents, tokens: bar.update(
            task, completed=corpus.bytes_read, documents=documents, tokens=tokens
        )
        yield progress
