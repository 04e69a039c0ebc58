"""Commands about corpora: text into shards of ids."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.data.corpus import Corpus
    from qkv.data.shards import Tell

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
            help="lines (a document a line), blank (blank lines between documents), whole (a document a file), "
            "jsonl or parquet; by default as the names end, but a .txt needs to be told."
        ),
    ] = None,
    field: Annotated[str, typer.Option(help="Where the text is, in jsonl, parquet and datasets.")] = "text",
    workers: Annotated[
        int | None, typer.Option(help="Threads beside the tokeniser's own; by default 4, or one for each core.")
    ] = None,
    shard_tokens: Annotated[int | None, typer.Option(help="Tokens of a shard; what a kill costs at most.")] = None,
) -> None:
    """Cut text into ids, once and for all. Kill it at any moment: the same command goes on after the last shard."""
    import os

    from qkv.data.corpus import Corpus
    from qkv.data.shards import SHARD_TOKENS
    from qkv.data.shards import build as build_shards
    from qkv.weights.tokenisers import find_tokenisers

    if workers is not None and workers < 0:
        raise InputError(f"--workers is {workers}; use 0 or more")
    tokeniser, _ = find_tokenisers(tokenizer)
    corpus = Corpus(files, format=format, field=field)
    with _progress(corpus) as progress:
        shards = build_shards(
            output,
            corpus,
            tokeniser,
            workers=min(4, os.cpu_count() or 1) if workers is None else workers,
            shard_tokens=SHARD_TOKENS if shard_tokens is None else shard_tokens,
            tell=progress,
        )
    held = f"{len(shards):,} documents, {shards.tokens:,} tokens, {len(shards.meta['shards']):,} shards"
    speed = f"{progress.speed():,.0f} tokens/s" if progress.tokens else "built before"
    print(f"{output}: {held}; {speed}")


class _Progress:
    """Counts what this command itself has done, since its first word, and shows it."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None  # when, and the tokens that were there before
        self.tokens = 0
        self.show: Tell = lambda documents, tokens: None  # noqa: ARG005

    def __call__(self, documents: int, tokens: int) -> None:
        self._first = self._first or (time.perf_counter(), tokens)
        self.tokens = tokens - self._first[1]
        self.show(documents, tokens)

    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / (time.perf_counter() - self._first[0]) if self._first else 0.0


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
        progress.show = lambda documents, tokens: bar.update(
            task, completed=corpus.read, documents=documents, tokens=tokens
        )
        yield progress
