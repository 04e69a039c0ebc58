"""Answers to questions about a text: exact match and F1 by the rules of SQuAD 1.1 and 2.0.

Rajpurkar et al. 2016 and 2018. Both sides are lower-cased, lose punctuation and the articles a, an, the, and are split
at white space; the best of a question's answers counts; figures are out of 100. In 2.0 an empty answer says that the
text holds none, which is right where the question has no answers and wrong everywhere else.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from qkv.errors import InputError
from qkv.evaluate.metric import Figures, Metric, Rows, check_aligned, ratio

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """What is left of an answer when it is compared. ASCII punctuation only goes, without a space in its place."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact(prediction: str, answer: str) -> float:
    """1 if the two are one after normalisation."""
    return float(normalise(prediction) == normalise(answer))


def overlap(prediction: str, answer: str, *, none_is_an_answer: bool = True) -> float:
    """F1 of the words as bags. Where one side has no words left, 2.0 compares the two, and 1.1 gives 0."""
    predicted, wanted = normalise(prediction).split(), normalise(answer).split()
    if not predicted or not wanted:
        return float(predicted == wanted) if none_is_an_answer else 0.0
    common = (Counter(predicted) & Counter(wanted)).total()
    return 2 * common / (len(predicted) + len(wanted))


@dataclass(frozen=True)
class Squad(Metric[str | None, Sequence[str]]):
    """Exact match and F1 of a prediction a question against its list of answers; a missing prediction counts 0."""

    name: ClassVar[str] = "squad"
    digits: ClassVar[int] = 2
    version: str = "1.1"

    @property
    def none_is_an_answer(self) -> bool:
        return self.version == "2.0"

    def statistics(self, hypotheses: Sequence[str | None], references: Sequence[Sequence[str]]) -> Rows:
        check_aligned(hypotheses, references)
        if not self.none_is_an_answer and not all(references):
            number = next(number for number, answers in enumerate(references, 1) if not answers)
            raise InputError(f"question {number} has no answer, which SQuAD 1.1 does not know; score it by squad2")
        return np.array([self._row(h, r) for h, r in zip(hypotheses, references, strict=True)], dtype=np.float64)

    def _row(self, prediction: str | None, answers: Sequence[str]) -> list[float]:
        """Exact, F1, 1; then the same three where there is an answer, and where there is none."""
        wanted = [a for a in answers if normalise(a)] if self.none_is_an_answer else list(answers)
        row = [0.0, 0.0, 1.0]
        if prediction is not None:
            possible = wanted or [""]
            row[0] = max(exact(prediction, a) for a in possible)
            row[1] = max(overlap(prediction, a, none_is_an_answer=self.none_is_an_answer) for a in possible)
        nothing = [0.0, 0.0, 0.0]
        # The script goes by the answers as given: one that is all articles makes the question answerable.
        return [*row, *(row if answers else nothing), *(nothing if answers else row)]

    def score(self, found: Rows) -> Figures:
        names = ("", "_answerable", "_unanswerable") if self.none_is_an_answer else ("",)
        out: Figures = {}
        for name, (match, words, count) in zip(names, found.reshape(3, 3)[: len(names)], strict=True):
            if count or not name:
                out |= {f"f1{name}": 100 * ratio(words, count), f"exact{name}": 100 * ratio(match, count)}
        return out

    def signature(self, references: Sequence[Sequence[str]]) -> str:  # noqa: ARG002
        return f"SQuAD {self.version}"


def best_threshold(
    scores: Mapping[str, float], answerable: Mapping[str, bool], no_answer: Mapping[str, float]
) -> tuple[float, float]:
    """SQuAD 2.0's best score over all thresholds of the no-answer score, out of 100, and that threshold.

    `scores`: each question's exact match or F1 if its answer is given; `no_answer`: how sure the model is that there is
    none. A question whose no-answer score is above the threshold is answered by nothing.
    """
    order = sorted(no_answer, key=lambda question: no_answer[question])
    value = float(sum(not answerable[question] for question in scores))
    best, threshold = value, 0.0
    for question in order:
        if question not in scores:
            continue
        # an answered question gains its score; one without answers loses its point if the model has an answer
        value += scores[question] if answerable[question] else scores[question] - 1
        if value > best:
            best, threshold = value, no_answer[question]
    return 100 * ratio(best, len(scores)), threshold
