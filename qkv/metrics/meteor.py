"""METEOR, computed by nltk: words that match exactly, by stem or by synonym, with a penalty for scattered matches.

The variant is nltk's, after Lavie & Agarwal 2007 (alpha 0.9, beta 3, gamma 0.5): lowercased, Penn Treebank
tokenization, Porter stems. It is not METEOR 1.5 of the Java program with its paraphrase tables. Synonyms need the
WordNet data, which nltk does not contain. Without it, words match exactly and by stem only, the score is slightly
lower, and the signature contains a note.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from qkv.metrics.metric import MeanMetric, Stats, check_texts, require_package
from qkv.metrics.registry import MetricEntry


class _NoSynonyms:
    """Replacement for nltk's WordNet in which no word has a synonym."""

    def synsets(self, word: str) -> list[Any]:  # noqa: ARG002
        return []


@cache
def load_wordnet() -> Any | None:
    """Return nltk's WordNet, or None if its data is not installed. Nothing is downloaded."""
    corpus = require_package("nltk.corpus", "METEOR").wordnet
    try:
        corpus.ensure_loaded()
    except LookupError:
        return None
    return corpus


class Meteor(MeanMetric[str, Sequence[str]]):
    """METEOR of the best reference of each text; the score of a corpus is the mean over texts."""

    name = "meteor"

    def values(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Stats:
        check_texts(hypotheses, references)
        meteor_score = require_package("nltk.translate.meteor_score", "METEOR").meteor_score
        # nltk's word_tokenize needs the data of a sentence splitter; the tokenization rules alone need none
        tokenize = require_package("nltk.tokenize", "METEOR").NLTKWordTokenizer().tokenize
        synonyms = load_wordnet() or _NoSynonyms()
        scores = [
            meteor_score([tokenize(reference) for reference in accepted], tokenize(hypothesis), wordnet=synonyms)
            for hypothesis, accepted in zip(hypotheses, references, strict=True)
        ]
        return np.array(scores)

    def signature(self, references: Sequence[Sequence[str]]) -> str:  # noqa: ARG002
        matched = (
            "exact, stem and synonym" if load_wordnet() is not None else "exact and stem only: WordNet is not installed"
        )
        return f"nltk, alpha 0.9, beta 3, gamma 0.5, {matched}"


METEOR = MetricEntry("texts", lambda *_: Meteor(), package="nltk")
