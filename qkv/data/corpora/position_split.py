"""Hold out the end of a text: the last documents, and the end of the document that the boundary falls into."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from qkv.data.corpora.corpus import Document


def split_documents(documents: Iterable[Document], fraction: float, *, held_out: bool) -> Iterator[Document]:
    """Yield the first documents, or with `held_out` the last ones, which have a fraction of all characters.

    Args:
        documents: the documents, which are read twice.
        fraction: the fraction that is held out.
        held_out: whether to yield the held-out part.
    """
    num_chars = sum(len(document.text) for document in documents)
    boundary = num_chars - round(fraction * num_chars)
    start = 0
    for document in documents:
        cut = _cut_position(document.text, min(max(boundary - start, 0), len(document.text)))
        text = document.text[cut:].lstrip("\n") if held_out else document.text[:cut]
        if text.strip():
            yield document if len(text) == len(document.text) else replace(document, text=text)
        start += len(document.text)


def _cut_position(text: str, position: int) -> int:
    """Return the end of the last line before a position; of the last word if there is only one line."""
    if position in (0, len(text)):
        return position
    for separator in ("\n", " "):
        end = text.rfind(separator, 0, position) + 1
        if end:
            return end
    return position
