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

from qkv.evaluate.metric import Mean, Rows, check_texts, library

_KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


@dataclass(frozen=True)
class Rouge(Mean[str, Sequence[str]]):
    """F1 of the four kinds, then their precisions and recalls; a corpus' figure is the mean over texts.

    Several references: for each kind the one with the best F1, or the mean over them. `stem`: words by Porter's stems.
    """

    name: ClassVar[str] = "rouge"
    figures: ClassVar[tuple[str, ...]] = (
        *_KINDS,
        *(f"{kind}_{side}" for kind in _KINDS for side in ("precision", "recall")),
    )
    references: Literal["best", "mean"] = "best"
    stem: bool = False
    newline: str = "\n"  # what stands between the sentences of a text, where a file keeps each text on one line

    def values(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Rows:
        check_texts(hypotheses, references)
        scorer = library("rouge_score.rouge_scorer", "ROUGE").RougeScorer(list(_KINDS), use_stemmer=self.stem)
        rows = []
        for hypothesis, accepted in zip(hypotheses, references, strict=True):
            found = [scorer.score(self._by_lines(reference), self._by_lines(hypothesis)) for reference in accepted]
            table = np.array([[one[kind] for kind in _KINDS] for one in found])  # [references, kinds, (P, R, F1)]
            best = table[table[:, :, 2].argmax(0), range(len(_KINDS))]  # [kinds, 3]
            chosen = best if self.references == "best" else table.mean(0)
            rows.append([*chosen[:, 2], *chosen[:, :2].ravel()])
        return np.array(rows)

    def _by_lines(self, text: str) -> str:
        return text.replace(self.newline, "\n")

    def signature(self, references: Sequence[Sequence[str]]) -> str:
        stems = "Porter's stems" if self.stem else "no stemming"
        several = f", {self.references} of several references" if any(len(r) > 1 for r in references) else ""
        return f"rouge-score, {stems}{several}, Lsum by lines"
