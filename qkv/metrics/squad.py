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
from qkv.metrics.metric import Metric, Scores, Stats, check_aligned, safe_divide

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """What is left of an answer when it is compared. ASCII punctuation only goes, without a space in its place."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """1 if the two are one after normalisation."""
    return float(normalize_answer(prediction) == normalize_answer(answer))


def answer_f1(prediction: str, answer: str, *, allow_no_answer: bool = True) -> float:
    """F1 of the words as bags. Where one side has no words left, 2.0 compares the two, and 1.1 gives 0."""
    predicted_tokens, gold_tokens = normalize_answer(prediction).split(), normalize_answer(answer).split()
    if not predicted_tokens or not gold_tokens:
        return float(predicted_tokens == gold_tokens) if allow_no_answer else 0.0
    common = (Counter(predicted_tokens) & Counter(gold_tokens)).total()
    return 2 * common / (len(predicted_tokens) + len(gold_tokens))


@dataclass(frozen=True)
class Squad(Metric[str | None, Sequence[str]]):
    """Exact match and F1 of a prediction a question against its list of answers; a missing prediction counts 0."""

    name: ClassVar[str] = "squad"
    decimals: ClassVar[int] = 2
    version: str = "1.1"

    @property
    def allow_no_answer(self) -> bool:
        return self.version == "2.0"

    def statistics(self, hypotheses: Sequence[str | None], references: Sequence[Sequence[str]]) -> Stats:
        check_aligned(hypotheses, references)
        if not self.allow_no_answer and not all(references):
            number = next(number for number, answers in enumerate(references, 1) if not answers)
            raise InputError(f"question {number} has no answer, which SQuAD 1.1 does not know; score it by squad2")
        return np.array([self._example_stats(h, r) for h, r in zip(hypotheses, references, strict=True)], dtype=np.float64)

    def _example_stats(self, prediction: str | None, answers: Sequence[str]) -> list[float]:
        """Exact, F1, 1; then the same three where there is an answer, and where there is none."""
        gold_answers = [a for a in answers if normalize_answer(a)] if self.allow_no_answer else list(answers)
        row = [0.0, 0.0, 1.0]
        if prediction is not None:
            candidates = gold_answers or [""]
            row[0] = max(exact_match(prediction, a) for a in candidates)
            row[1] = max(answer_f1(prediction, a, allow_no_answer=self.allow_no_answer) for a in candidates)
        zeros = [0.0, 0.0, 0.0]
        # The script goes by the answers as given: one that is all articles makes the question answerable.
        return [*row, *(row if answers else zeros), *(zeros if answers else row)]

    def score(self, stats: Stats) -> Scores:
        suffixes = ("", "_answerable", "_unanswerable") if self.allow_no_answer else ("",)
        scores: Scores = {}
        for suffix, (exact_sum, f1_sum, count) in zip(suffixes, stats.reshape(3, 3)[: len(suffixes)], strict=True):
            if count or not suffix:
                scores |= {f"f1{suffix}": 100 * safe_divide(f1_sum, count), f"exact_match{suffix}": 100 * safe_divide(exact_sum, count)}
        return scores

    def signature(self, references: Sequence[Sequence[str]]) -> str:  # noqa: ARG002
        return f"SQuAD {self.version}"


def best_threshold(
    scores: Mapping[str, float], answerable: Mapping[str, bool], null_scores: Mapping[str, float]
) -> tuple[float, float]:
    """SQuAD 2.0's best score over all thresholds of the no-answer score, out of 100, and that threshold.

    `scores`: each question's exact match or F1 if its answer is given; `null_scores`: how sure the model is that there is
    none. A question whose no-answer score is above the threshold is answered by nothing.
    """
    order = sorted(null_scores, key=lambda question: null_scores[question])
    total = float(sum(not answerable[question] for question in scores))
    best, threshold = total, 0.0
    for question in order:
        if question not in scores:
            continue
        # an answered question gains its score; one without answers loses its point if the model has an answer
        total += scores[question] if answerable[question] else scores[question] - 1
        if total > best:
            best, threshold = total, null_scores[question]
    return 100 * safe_divide(best, len(scores)), threshold
