"""The result of a prediction, for every task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Alternative(NamedTuple):
    """One of the n best outputs for an input."""

    text: str
    score: float  # as `TaskPrediction.score`


@dataclass(frozen=True)
class TaskPrediction:
    """The prediction for one input."""

    prediction: Any
    """The prediction as the task's metrics take it: a label, a number, tags, a text and so on."""

    text: str
    """The prediction as one line of text."""

    score: float | None
    """Probability of a label, an answer or a choice; log-probability of a generated text; a regression's number."""

    alternatives: tuple[Alternative, ...]
    """The n best outputs with their scores, best first."""

    fields: dict[str, Any] = field(default_factory=dict)
    """The prediction as JSON values."""

    probability: float | None = None
    """The probability of the prediction; None for numbers, generated texts and vectors."""

    word_probs: tuple[float, ...] = ()
    """The probability of each word's tag (token classification)."""

    span: tuple[int, int] | None = None
    """The characters of the answer in its context (question answering)."""

    truncated: bool = False
    """Whether the input was longer than the model's maximum length and was cut."""

    def error_probability(self, gold: Sequence[Any]) -> float | None:
        """Return the probability that the model gave to an error: for tags, to the most probable wrong one."""
        if not self.word_probs:
            return self.probability
        tags = zip(self.word_probs, self.prediction, gold, strict=True)
        return max((prob for prob, predicted, expected in tags if predicted != expected), default=self.probability)


def rank(names: Sequence[str], scores: Sequence[float]) -> tuple[Alternative, ...]:
    """Return names with their scores, the highest score first."""
    return tuple(sorted(map(Alternative, names, scores), key=lambda alternative: -alternative.score))
