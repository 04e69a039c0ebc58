"""ROUGE-1, 2, L and Lsum (Lin 2004) by rouge-score: overlap of words, bigrams and longest common subsequences.

Words are sequences of a–z and 0–9 in the lowercased text: a text in another script has none and scores 0, and an umlaut
splits a word in two. Lsum treats each line as a sentence: summaries need a newline between sentences, otherwise Lsum
equals L.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from qkv.metrics.metric import MeanMetric, Stats, check_texts, require_package
from qkv.metrics.registry import AllSides, MetricEntry, MetricOptions

_ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


@dataclass(frozen=True)
class Rouge(MeanMetric[str, Sequence[str]]):
    """F1 of the four ROUGE types, then their precision and recall; the score of a corpus is the mean over texts."""

    name: ClassVar[str] = "rouge"
    score_names: ClassVar[tuple[str, ...]] = (
        *_ROUGE_TYPES,
        *(f"{kind}_{side}" for kind in _ROUGE_TYPES for side in ("precision", "recall")),
    )
    multi_reference: Literal["best", "mean"] = "best"
    """Of several references: the one with the best F1 for each type, or the mean over all."""
    use_stemmer: bool = False
    """Compare Porter stems instead of words."""
    sentence_separator: str = "\n"
    """Separator of the sentences of a text, for files with one text per line."""

    def values(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Stats:
        check_texts(hypotheses, references)
        rouge_scorer = require_package("rouge_score.rouge_scorer", "ROUGE")
        scorer = rouge_scorer.RougeScorer(list(_ROUGE_TYPES), use_stemmer=self.use_stemmer)
        rows = []
        for hypothesis, accepted in zip(hypotheses, references, strict=True):
            hypothesis_lines = self._split_sentences(hypothesis)
            results = [scorer.score(self._split_sentences(reference), hypothesis_lines) for reference in accepted]
            table = np.array([[result[kind] for kind in _ROUGE_TYPES] for result in results])  # [references, kinds, 3]
            best = table[table[:, :, 2].argmax(0), range(len(_ROUGE_TYPES))]  # [kinds, (P, R, F1)]
            selected = best if self.multi_reference == "best" else table.mean(0)
            rows.append([*selected[:, 2], *selected[:, :2].ravel()])
        return np.array(rows)

    def _split_sentences(self, text: str) -> str:
        return text.replace(self.sentence_separator, "\n")

    def signature(self, references: Sequence[Sequence[str]]) -> str:
        stems = "Porter's stems" if self.use_stemmer else "no stemming"
        has_several = any(len(accepted) > 1 for accepted in references)
        reference_note = f", {self.multi_reference} of several references" if has_several else ""
        return f"rouge-score, {stems}{reference_note}, Lsum by lines"


def _make_rouge(options: MetricOptions, _: AllSides) -> Rouge:
    return Rouge(options.multi_reference, options.use_stemmer, options.sentence_separator)


ROUGE = MetricEntry(
    "texts", _make_rouge, ("multi_reference", "use_stemmer", "sentence_separator"), _ROUGE_TYPES, package="rouge_score"
)
