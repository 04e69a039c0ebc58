"""`qkv similar`: neighbors of words, analogies, and plots of word vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from qkv.cli.help import OUTPUT
from qkv.cli.options import Json, check_n_best

VectorSource = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|FILE",
        help="Folder of a run or checkpoint, whose token embeddings are used, or a file of word vectors "
        "(.bin, .txt, .vec, .glove, also .gz).",
    ),
]
Queries = Annotated[list[str], typer.Argument(metavar="WORD", help='Words, or analogies such as "king - man + woman".')]
NBest = Annotated[int, typer.Option("--n-best", "-n", metavar="N", help="Print this many neighbors per query.")]
PlotFile = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Plot the words in two dimensions (PCA) to this .png, .svg or .pdf file, instead of their neighbors.",
        rich_help_panel=OUTPUT,
    ),
]


def similar(
    model: VectorSource, queries: Queries, n_best: NBest = 10, plot: PlotFile = None, as_json: Json = False
) -> None:
    """Find the words with the most similar vectors, by their cosine.

    Examples:
        qkv similar runs/word2vec whale
        qkv similar vectors.bin "king - man + woman" --n-best 3
        qkv similar runs/word2vec king queen man woman --plot words.png
    """
    from qkv.checkpoints.word_vectors import load_word_vectors

    check_n_best(n_best)
    vectors = load_word_vectors(model)
    if plot is not None:
        from qkv.analysis.vector_plot import plot_vectors

        plot_vectors(queries, vectors.vectors[[vectors.row(word) for word in queries]], plot)
        print(f"{plot}: {len(queries)} words of {model}")
        return
    results = {query: vectors.similar(query, n_best) for query in queries}
    if as_json:
        for query, neighbors in results.items():
            rows = [{"word": word, "cosine": round(cosine, 6)} for word, cosine in neighbors]
            print(json.dumps({"query": query, "neighbors": rows}, ensure_ascii=False))
        return
    for query, neighbors in results.items():
        if len(results) > 1:
            print(f"{query}:")
        width = max((len(word) for word, _ in neighbors), default=0)
        for word, cosine in neighbors:
            print(f"{'  ' if len(results) > 1 else ''}{word:<{width}}  {cosine:.3f}")
