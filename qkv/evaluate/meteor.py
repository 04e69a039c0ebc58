"""METEOR, by nltk: words matched exactly, by stem and by synonym, and a penalty for matches that are scattered.

The variant: nltk's, after Lavie & Agarwal 2007 (alpha 0.9, beta 3, gamma 0.5), lower-cased, words cut as in the Penn
Treebank, Porter's stems; not the Java program's METEOR 1.5 with its paraphrase tables. Synonyms need WordNet, which
nltk does not carry. Where it is absent words match exactly and by stem only, the figure is a little lower, and the
signature says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from qkv.evaluate.metric import Mean, Rows, check_texts, library


class _NoSynonyms:
    """Stands where nltk asks WordNet: no word has another."""

    def synsets(self, word: str) -> list[Any]:  # noqa: ARG002
        return []


@cache
def wordnet() -> Any | None:
    """nltk's WordNet, or None if its data is not on this machine; nothing is fetched."""
    found = library("nltk.corpus", "METEOR").wordnet
    try:
        found.ensure_loaded()
    except LookupError:
        return None
    return found


class Meteor(Mean[str, Sequence[str]]):
    """The best of a text's references counts; a corpus' figure is the mean over texts."""

    name = "meteor"
    figures = ("meteor",)

    def values(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Rows:
        check_texts(hypotheses, references)
        score = library("nltk.translate.meteor_score", "METEOR").meteor_score
        # The rules need no data; nltk's word_tokenize would first ask for a sentence splitter that does.
        words = library("nltk.tokenize", "METEOR").NLTKWordTokenizer().tokenize
        synonyms = wordnet() or _NoSynonyms()
        rows = zip(hypotheses, references, strict=True)
        return np.array([score([words(r) for r in accepted], words(h), wordnet=synonyms) for h, accepted in rows])

    def signature(self, references: Sequence[Sequence[str]]) -> str:  # noqa: ARG002
        matched = (
            "exact, stem and synonym" if wordnet() is not None else "exact and stem only: WordNet is not installed"
        )
        return f"nltk, alpha 0.9, beta 3, gamma 0.5, {matched}"
