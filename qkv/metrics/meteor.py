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

from qkv.metrics.metric import MeanMetric, Stats, check_texts, require_package


class _NoSynonyms:
    """Stands where nltk asks WordNet: no word has another."""

    def synsets(self, word: str) -> list[Any]:  # noqa: ARG002
        return []


@cache
def load_wordnet() -> Any | None:
    """nltk's WordNet, or None if its data is not on this machine; nothing is fetched."""
    corpus = require_package("nltk.corpus", "METEOR").wordnet
    try:
        corpus.ensure_loaded()
    except LookupError:
        return None
    return corpus


class Meteor(MeanMetric[str, Sequence[str]]):
    """The best of a text's references counts; a corpus' figure is the mean over texts."""

    name = "meteor"
    score_names = ("meteor",)

    def values(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Stats:
        check_texts(hypotheses, references)
        meteor_score = require_package("nltk.translate.meteor_score", "METEOR").meteor_score
        # The rules need no data; nltk's word_tokenize would first ask for a sentence splitter that does.
        tokenize = require_package("nltk.tokenize", "METEOR").NLTKWordTokenizer().tokenize
        synonyms = load_wordnet() or _NoSynonyms()
        pairs = zip(hypotheses, references, strict=True)
        return np.array([meteor_score([tokenize(r) for r in accepted], tokenize(h), wordnet=synonyms) for h, accepted in pairs])

    def signature(self, references: Sequence[Sequence[str]]) -> str:  # noqa: ARG002
        matched = (
            "exact, stem and synonym" if load_wordnet() is not None else "exact and stem only: WordNet is not installed"
        )
        return f"nltk, alpha 0.9, beta 3, gamma 0.5, {matched}"
