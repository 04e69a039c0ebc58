"""Metrics of labels: accuracy, precision, recall, F1 and the Matthews correlation coefficient.

An example is one label, a sequence of labels (a tagged sentence) or a set of labels (multi-label classification). The
scores equal those of scikit-learn, with 0 for a division by 0.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from qkv.errors import InputError, did_you_mean
from qkv.metrics.metric import Hypothesis, MeanMetric, Metric, Reference, Scores, Stats, check_aligned, safe_divide
from qkv.metrics.registry import AllSides, AnyMetric, MetricEntry, MetricOptions

Label = str | int
Labels = Label | Sequence[Label] | Set[Label]  # the labels of one example
Average = Literal["micro", "macro"]


def collect_label_set(*sides: Iterable[Labels]) -> tuple[Label, ...]:
    """Return every label that occurs, in alphabetical order."""
    labels = {label for side in sides for example in side for label in _as_list(example)}
    return tuple(sorted(labels, key=str))


class Accuracy(MeanMetric[Labels, Labels]):
    """Fraction of examples that are entirely correct: labels, whole sequences, whole sets (subset accuracy)."""

    name = "accuracy"
    data_kind = "labels"

    def values(self, hypotheses: Sequence[Labels], references: Sequence[Labels]) -> Stats:
        return np.array([_labels_equal(h, r) for h, r in zip(hypotheses, references, strict=True)], dtype=np.float64)


class TokenAccuracy(Metric[Sequence[Label], Sequence[Label]]):
    """Fraction of tokens with the correct label."""

    name = "token_accuracy"
    data_kind = "tags"

    def statistics(self, hypotheses: Sequence[Sequence[Label]], references: Sequence[Sequence[Label]]) -> Stats:
        check_sequences(hypotheses, references)
        pairs = zip(hypotheses, references, strict=True)
        return np.array([(sum(map(_labels_equal, h, r)), len(r)) for h, r in pairs], dtype=np.float64)

    def score(self, stats: Stats) -> Scores:
        return {"accuracy": safe_divide(stats[0], stats[1])}


class PrecisionRecallF1(Metric[Hypothesis, Reference]):
    """Precision, recall and F1 of labeled items, from the counts of correct, predicted and gold items per label.

    The averages are micro (over all items), macro (over labels) and weighted (over labels, by their gold count).
    """

    labels: tuple[Label, ...]
    """Labels that count."""
    average: Average
    """Average that comes first among the scores."""

    @abstractmethod
    def labels_to_count(self, hypothesis: Hypothesis, reference: Reference) -> tuple[Iterable[Label], ...]:
        """Return the labels of an example's correct, predicted and gold items."""

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
        counts = correct, predicted, gold = stats.reshape(3, -1)  # [labels] each
        class_rates = _precision_recall_f1(correct, predicted, gold)
        micro_rates = _precision_recall_f1(*(np.array([count.sum()]) for count in counts))
        averages = {"micro": [float(rate[0]) for rate in micro_rates]}
        averages["macro"] = [float(rates.mean()) if len(rates) else 0.0 for rates in class_rates]
        averages["weighted"] = [safe_divide(float(rates @ gold), float(gold.sum())) for rates in class_rates]
        order = sorted(averages, key=lambda average: average != self.average)
        return {f"{rate}_{average}": averages[average][i] for average in order for i, rate in _RATE_ORDER}

    def per_class(self, stats: Stats) -> dict[Label, Scores]:
        """Return precision, recall, F1 and support (gold count) of each label."""
        correct, predicted, gold = stats.sum(0).reshape(3, -1)
        table = zip(self.labels, *_precision_recall_f1(correct, predicted, gold), gold, strict=True)
        names = ("precision", "recall", "f1", "support")
        return {label: dict(zip(names, map(float, scores), strict=True)) for label, *scores in table}


_RATE_ORDER = ((2, "f1"), (0, "precision"), (1, "recall"))


def _precision_recall_f1(correct: Stats, predicted: Stats, gold: Stats) -> tuple[Stats, Stats, Stats]:
    """Return precision, recall and their harmonic mean, which equals 2 correct / (predicted + gold)."""

    def divide(numerator: Stats, denominator: Stats) -> Stats:
        return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)

    return divide(correct, predicted), divide(correct, gold), divide(2 * correct, predicted + gold)


@dataclass(frozen=True)
class F1(PrecisionRecallF1[Labels, Labels]):
    """Precision, recall and F1 over `labels`: all labels, all but "O", or only the positive one."""

    name: ClassVar[str] = "f1"
    labels: tuple[Label, ...]
    average: Average = "macro"

    def labels_to_count(self, hypothesis: Labels, reference: Labels) -> tuple[Iterable[Label], ...]:
        if isinstance(hypothesis, Set) and isinstance(reference, Set):
            return hypothesis & reference, hypothesis, reference
        predicted, gold = _as_list(hypothesis), _as_list(reference)
        if len(predicted) != len(gold):
            raise InputError(f"{len(predicted)} predicted labels for a sequence of {len(gold)}; give one for each")
        return [p for p, g in zip(predicted, gold, strict=True) if p == g], predicted, gold


@dataclass(frozen=True)
class MatthewsCorrelation(F1):
    """Matthews correlation coefficient for two classes (Matthews 1975) or any number (Gorodkin 2004).

    It is 0 if one side is constant. `labels` must contain every label that occurs.
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
    """Count how often each gold label was predicted as each label.  # [gold, predicted]"""
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
    """Check that each hypothesis is a sequence of as many labels as its reference."""
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


def _make_f1(average: Average) -> Callable[[MetricOptions, AllSides], AnyMetric]:
    def make(options: MetricOptions, sides: AllSides) -> AnyMetric:
        labels = _select_labels(options, collect_label_set(*sides))
        # all three averages over one label are its own F1
        return F1(labels, "micro" if options.positive_label is not None else average)

    return make


def _select_labels(options: MetricOptions, labels: tuple[Label, ...]) -> tuple[Label, ...]:
    named_labels = [*options.ignore, *([options.positive_label] if options.positive_label is not None else [])]
    for label in named_labels:
        if label not in labels:
            raise InputError(f"label '{label}' occurs nowhere; {did_you_mean(str(label), map(str, labels))}")
    if options.positive_label is not None:
        return (options.positive_label,)
    remaining = tuple(label for label in labels if label not in options.ignore)
    if not remaining:
        raise InputError("--ignore: names every label that occurs, so that none is left to score; leave out one")
    return remaining


_F1_OPTIONS = ("positive_label", "ignore")
ACCURACY = MetricEntry("labels", lambda *_: Accuracy())
MACRO_F1 = MetricEntry("labels", _make_f1("macro"), _F1_OPTIONS)
MATTHEWS_CORRELATION = MetricEntry("labels", lambda _, sides: MatthewsCorrelation(collect_label_set(*sides)))
MULTILABEL_F1 = MetricEntry("label_sets", _make_f1("micro"), (*_F1_OPTIONS, "label_separator"))
MULTILABEL_ACCURACY = MetricEntry("label_sets", lambda *_: Accuracy(), ("label_separator",))
TOKEN_F1 = MetricEntry("tags", _make_f1("macro"), _F1_OPTIONS)
TOKEN_ACCURACY = MetricEntry("tags", lambda *_: TokenAccuracy())
SEQUENCE_ACCURACY = MetricEntry("tags", lambda *_: Accuracy())
