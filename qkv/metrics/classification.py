"""Labels against labels: accuracy, precision, recall, F1 and Matthews' correlation.

An example is one label, a sequence of labels (a tagged sentence) or a set of them (multi-label); the figures are those
of scikit-learn, with 0 where nothing can be divided.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from qkv.errors import InputError
from qkv.metrics.metric import Hypothesis, MeanMetric, Metric, Reference, Scores, Stats, check_aligned, safe_divide

Label = str | int
Labels = Label | Sequence[Label] | Set[Label]  # of one example
Average = Literal["micro", "macro"]


def collect_label_set(*sides: Iterable[Labels]) -> tuple[Label, ...]:
    """Every label that occurs, in order: what an F1 over "all classes" counts."""
    labels = {label for side in sides for example in side for label in _as_list(example)}
    return tuple(sorted(labels, key=str))


class Accuracy(MeanMetric[Labels, Labels]):
    """The share of examples that are wholly right: labels, whole sequences, whole sets (subset accuracy)."""

    name = "accuracy"
    score_names = ("accuracy",)

    def values(self, hypotheses: Sequence[Labels], references: Sequence[Labels]) -> Stats:
        return np.array([_labels_equal(h, r) for h, r in zip(hypotheses, references, strict=True)], dtype=np.float64)


class TokenAccuracy(Metric[Sequence[Label], Sequence[Label]]):
    """The share of tokens that carry the right label."""

    name = "token_accuracy"

    def statistics(self, hypotheses: Sequence[Sequence[Label]], references: Sequence[Sequence[Label]]) -> Stats:
        check_sequences(hypotheses, references)
        pairs = zip(hypotheses, references, strict=True)
        return np.array([(sum(map(_labels_equal, h, r)), len(r)) for h, r in pairs], dtype=np.float64)

    def score(self, stats: Stats) -> Scores:
        return {"accuracy": safe_divide(stats[0], stats[1])}


class PrecisionRecallF1(Metric[Hypothesis, Reference]):
    """Precision, recall and F1 of things that have a label: counts of right, predicted and true ones by label.

    micro: over all things alike; macro: the mean over labels; weighted: the same, by how often a label is true.
    """

    labels: tuple[Label, ...]  # those that count
    average: Average  # the one that is named first

    @abstractmethod
    def labels_to_count(self, hypothesis: Hypothesis, reference: Reference) -> tuple[Iterable[Label], ...]:
        """Of one example the labels of the right, of the predicted and of the true things."""

    def statistics(self, hypotheses: Sequence[Hypothesis], references: Sequence[Reference]) -> Stats:
        check_aligned(hypotheses, references)
        column_of = {label: column for column, label in enumerate(self.labels)}
        stats = np.zeros((len(hypotheses), 3, len(column_of)))
        for row, hypothesis, reference in zip(stats, hypotheses, references, strict=True):
            for kind, labels in enumerate(self.labels_to_count(hypothesis, reference)):
                for label in labels:
                    if label in column_of:
                        row[kind, column_of[label]] += 1
        return stats.reshape(len(hypotheses), -1)

    def score(self, stats: Stats) -> Scores:
        correct, predicted, gold = stats.reshape(3, -1)  # [labels] each
        class_rates = _precision_recall_f1(correct, predicted, gold)
        averages = {"micro": [float(x[0]) for x in _precision_recall_f1(*(np.array([x.sum()]) for x in (correct, predicted, gold)))]}
        averages["macro"] = [float(x.mean()) if len(x) else 0.0 for x in class_rates]
        averages["weighted"] = [safe_divide(float(x @ gold), float(gold.sum())) for x in class_rates]
        order = sorted(averages, key=lambda average: average != self.average)
        return {f"{rate}_{a}": averages[a][i] for a in order for i, rate in _RATE_ORDER}

    def per_class(self, stats: Stats) -> dict[Label, Scores]:
        """Precision, recall and F1 of each label, and its support: how often it is true."""
        correct, predicted, gold = stats.sum(0).reshape(3, -1)
        table = zip(self.labels, *_precision_recall_f1(correct, predicted, gold), gold, strict=True)
        names = ("precision", "recall", "f1", "support")
        return {label: dict(zip(names, map(float, scores), strict=True)) for label, *scores in table}


_RATE_ORDER = ((2, "f1"), (0, "precision"), (1, "recall"))


def _precision_recall_f1(correct: Stats, predicted: Stats, gold: Stats) -> tuple[Stats, Stats, Stats]:
    """Precision, recall and their harmonic mean, which is also 2 right / (predicted + true)."""

    def divide(numerator: Stats, denominator: Stats) -> Stats:
        return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)

    return divide(correct, predicted), divide(correct, gold), divide(2 * correct, predicted + gold)


@dataclass(frozen=True)
class F1(PrecisionRecallF1[Labels, Labels]):
    """Precision, recall and F1 over `labels`: all of them, without "O", or only the positive one, as a task counts."""

    name: ClassVar[str] = "f1"
    labels: tuple[Label, ...]
    average: Average = "macro"

    def labels_to_count(self, hypothesis: Labels, reference: Labels) -> tuple[Iterable[Label], ...]:
        if isinstance(hypothesis, Set) and isinstance(reference, Set):
            return hypothesis & reference, hypothesis, reference
        predicted, gold = _as_list(hypothesis), _as_list(reference)
        if len(predicted) != len(gold):
            raise InputError(f"a sequence of {len(gold)} labels has {len(predicted)} predicted ones; give as many")
        return [p for p, t in zip(predicted, gold, strict=True) if p == t], predicted, gold


@dataclass(frozen=True)
class MatthewsCorrelation(F1):
    """Matthews' correlation, for two classes (Matthews 1975) or any number (Gorodkin 2004).

    0 where one side is constant. `labels` must hold every label that occurs.
    """

    name: ClassVar[str] = "matthews_correlation"

    def score(self, stats: Stats) -> Scores:
        correct, predicted, gold = stats.reshape(3, -1)
        total = gold.sum()
        covariance = correct.sum() * total - predicted @ gold
        variance_product = (total**2 - predicted @ predicted) * (total**2 - gold @ gold)
        return {"matthews_correlation": safe_divide(covariance, float(np.sqrt(variance_product)))}


def confusion_matrix(
    hypotheses: Sequence[Label], references: Sequence[Label], labels: Sequence[Label]
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """How often each true label (down) was taken for each other (across)."""
    check_aligned(hypotheses, references)
    index_of = {label: i for i, label in enumerate(labels)}
    matrix = np.zeros((len(labels), len(labels)), dtype=np.int64)
    for (hypothesis, reference), count in Counter(zip(hypotheses, references, strict=True)).items():
        if hypothesis not in index_of or reference not in index_of:
            unknown_label = reference if hypothesis in index_of else hypothesis
            raise InputError(f"label '{unknown_label}' is not one of the {len(labels)} labels of the table; add it")
        matrix[index_of[reference], index_of[hypothesis]] += count
    return matrix


def check_sequences(hypotheses: Sequence[Sequence[object]], references: Sequence[Sequence[object]]) -> None:
    """Refuses sequences of labels that are not as long as those that they are held against."""
    check_aligned(hypotheses, references)
    for number, (hypothesis, reference) in enumerate(zip(hypotheses, references, strict=True), 1):
        if len(hypothesis) != len(reference):
            counts = f"{len(hypothesis)} predicted labels for {len(reference)} tokens"
            raise InputError(f"example {number}: {counts}; give one for each")


def _as_list(labels: Labels) -> list[Label]:
    return [labels] if isinstance(labels, str | int) else list(labels)


def _labels_equal(a: Labels, b: Labels) -> bool:
    if isinstance(a, Set) and isinstance(b, Set):
        return set(a) == set(b)
    return _as_list(a) == _as_list(b)
