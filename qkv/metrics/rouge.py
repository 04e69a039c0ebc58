"""ROUGE-1, 2, L and Lsum (Lin 2004), by rouge-score: overlap of words, of pairs of words, of longest common sequences.

Its words are runs of a–z and 0–9 after lower-casing: a text in another script has none and scores 0, and umlauts cut a
word in two. Lsum takes each line of a text for a sentence: summaries must come with a newline between sentences, or
Lsum is L.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from qkv.metrics.metric import MeanMetric, Stats, check_texts, require_package

_ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


@dataclass(frozen=True)
class Rouge(MeanMetric[str, Sequence[str]]):
    """F1 of the four kinds, then their precisions and recalls; a corpus' figure is the mean over texts.

    Several references: for each kind the one with the best F1, or the mean over them. `use_stemmer`: words by Porter's stems.
    """

    name: ClassVar[str] = "rouge"
    score_names: ClassVar[tuple[str, ...]] = (
        *_ROUGE_TYPES,
        *(f"{kind}_{side}" for kind in _ROUGE_TYPES for side in ("precision", "recall")),
    )
    multi_reference: Literal["best", "mean"] = "best"
    use_stemmer: bool = False
    sentence_separator: str = "\n"  # what stands between the sentences of a text, where a file keeps each text on one line

    def values(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Stats:
        check_texts(hypotheses, references)
        scorer = require_package("rouge_score.rouge_scorer", "ROUGE").RougeScorer(list(_ROUGE_TYPES), use_stemmer=self.use_stemmer)
        rows = []
        for hypothesis, accepted in zip(hypotheses, references, strict=True):
            results = [scorer.score(self._split_sentences(reference), self._split_sentences(hypothesis)) for reference in accepted]
            table = np.array([[result[kind] for kind in _ROUGE_TYPES] for result in results])  # [references, kinds, (P, R, F1)]
            best = table[table[:, :, 2].argmax(0), range(len(_ROUGE_TYPES))]  # [kinds, 3]
            selected = best if self.multi_reference == "best" else table.mean(0)
            rows.append([*selected[:, 2], *selected[:, :2].ravel()])
        return np.array(rows)

    def _split_sentences(self, text: str) -> str:
        return text.replace(self.sentence_separator, "\n")

    def signature(self, references: Sequence[Sequence[str]]) -> str:
        stems = "Porter's stems" if self.use_stemmer else "no stemming"
        reference_note = f", {self.multi_reference} of several references" if any(len(r) > 1 for r in references) else ""
        return f"rouge-score, {stems}{reference_note}, Lsum by lines"
