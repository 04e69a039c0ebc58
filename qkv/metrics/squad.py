"""Exact match and F1 of answers to questions about a text, by the rules of SQuAD 1.1 and 2.0.

Rajpurkar et al. 2016 and 2018. Both sides are lowercased, lose punctuation and the articles a, an, the, and are split
at white space; the best of a question's answers counts; scores are between 0 and 100. In 2.0 an empty prediction means
that the text has no answer, which is correct for unanswerable questions only.
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
from qkv.metrics.registry import MetricEntry

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Return an answer as it is compared. Only ASCII punctuation is removed, and no space replaces it."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """Return 1 if two answers are equal after normalization, else 0."""
    return float(normalize_answer(prediction) == normalize_answer(answer))


def answer_f1(prediction: str, answer: str, *, allow_no_answer: bool = True) -> float:
    """Return the F1 of the words as bags. If one side has no words, 2.0 compares the two sides, and 1.1 gives 0."""
    predicted_tokens, gold_tokens = normalize_answer(prediction).split(), normalize_answer(answer).split()
    if not predicted_tokens or not gold_tokens:
        return float(predicted_tokens == gold_tokens) if allow_no_answer else 0.0
    common = (Counter(predicted_tokens) & Counter(gold_tokens)).total()
    return 2 * common / (len(predicted_tokens) + len(gold_tokens))


@dataclass(frozen=True)
class Squad(Metric[str | None, Sequence[str]]):
    """Exact match and F1 of one prediction per question against its list of answers. A missing prediction counts 0."""

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
            raise InputError(f"question {number} has no answer, which SQuAD 1.1 does not allow; use the metric squad2")
        pairs = zip(hypotheses, references, strict=True)
        return np.array([self._example_stats(prediction, answers) for prediction, answers in pairs], dtype=np.float64)

    def _example_stats(self, prediction: str | None, answers: Sequence[str]) -> list[float]:
        """Return exact match, F1 and count, for all questions, for answerable and for unanswerable ones.  # [9]"""
        gold_answers = (
            [answer for answer in answers if normalize_answer(answer)] if self.allow_no_answer else list(answers)
        )
        row = [0.0, 0.0, 1.0]
        if prediction is not None:
            candidates = gold_answers or [""]
            row[0] = max(exact_match(prediction, answer) for answer in candidates)
            row[1] = max(answer_f1(prediction, answer, allow_no_answer=self.allow_no_answer) for answer in candidates)
        zeros = [0.0, 0.0, 0.0]
        # as in the official script, an answer of articles only makes the question answerable
        return [*row, *(row if answers else zeros), *(zeros if answers else row)]

    def score(self, stats: Stats) -> Scores:
        suffixes = ("", "_answerable", "_unanswerable") if self.allow_no_answer else ("",)
        scores: Scores = {}
        for suffix, (exact_sum, f1_sum, count) in zip(suffixes, stats.reshape(3, 3)[: len(suffixes)], strict=True):
            if count or not suffix:
                scores[f"f1{suffix}"] = 100 * safe_divide(f1_sum, count)
                scores[f"exact_match{suffix}"] = 100 * safe_divide(exact_sum, count)
        return scores

    def signature(self, references: Sequence[Sequence[str]]) -> str:  # noqa: ARG002
        return f"SQuAD {self.version}"


SQUAD = MetricEntry("answers", lambda *_: Squad())
SQUAD2 = MetricEntry("answers", lambda *_: Squad("2.0"))


def best_threshold(
    scores: Mapping[str, float], answerable: Mapping[str, bool], null_scores: Mapping[str, float]
) -> tuple[float, float]:
    """Return the best SQuAD 2.0 score over all thresholds of the no-answer score, and that threshold.

    Args:
        scores: exact match or F1 of the answer that the model would give to each question.
        answerable: whether each question has an answer.
        null_scores: the model's score of "no answer". A question whose score is above the threshold is left unanswered.
    """
    order = sorted(null_scores, key=lambda question: null_scores[question])
    total = float(sum(not answerable[question] for question in scores))
    best, threshold = total, 0.0
    for question in order:
        if question not in scores:
            continue
        # answering gains the score of an answerable question, and loses the point of an unanswerable one
        total += scores[question] if answerable[question] else scores[question] - 1
        if total > best:
            best, threshold = total, null_scores[question]
    return 100 * safe_divide(best, len(scores)), threshold
