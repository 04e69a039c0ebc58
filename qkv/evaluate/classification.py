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
from qkv.evaluate.metric import Figures, Hypothesis, Mean, Metric, Reference, Rows, check_aligned, ratio

Label = str | int
Labels = Label | Sequence[Label] | Set[Label]  # of one example
Average = Literal["micro", "macro"]


def label_set(*sides: Iterable[Labels]) -> tuple[Label, ...]:
    """Every label that occurs, in order: what an F1 over "all classes" counts."""
    found = {label for side in sides for example in side for label in _listed(example)}
    return tuple(sorted(found, key=str))


class Accuracy(Mean[Labels, Labels]):
    """The share of examples that are wholly right: labels, whole sequences, whole sets (subset accuracy)."""

    name = "accuracy"
    figures = ("accuracy",)

    def values(self, hypotheses: Sequence[Labels], references: Sequence[Labels]) -> Rows:
        return np.array([_same(h, r) for h, r in zip(hypotheses, references, strict=True)], dtype=np.float64)


class TokenAccuracy(Metric[Sequence[Label], Sequence[Label]]):
    """The share of tokens that carry the right label."""

    name = "token_accuracy"

    def statistics(self, hypotheses: Sequence[Sequence[Label]], references: Sequence[Sequence[Label]]) -> Rows:
        check_sequences(hypotheses, references)
        rows = zip(hypotheses, references, strict=True)
        return np.array([(sum(map(_same, h, r)), len(r)) for h, r in rows], dtype=np.float64)

    def score(self, found: Rows) -> Figures:
        return {"accuracy": ratio(found[0], found[1])}


class Tally(Metric[Hypothesis, Reference]):
    """Precision, recall and F1 of things that have a label: counts of right, predicted and true ones by label.

    micro: over all things alike; macro: the mean over labels; weighted: the same, by how often a label is true.
    """

    labels: tuple[Label, ...]  # those that count
    average: Average  # the one that is named first

    @abstractmethod
    def things(self, hypothesis: Hypothesis, reference: Reference) -> tuple[Iterable[Label], ...]:
        """Of one example the labels of the right, of the predicted and of the true things."""

    def statistics(self, hypotheses: Sequence[Hypothesis], references: Sequence[Reference]) -> Rows:
        check_aligned(hypotheses, references)
        place = {label: column for column, label in enumerate(self.labels)}
        rows = np.zeros((len(hypotheses), 3, len(place)))
        for row, hypothesis, reference in zip(rows, hypotheses, references, strict=True):
            for kind, labels in enumerate(self.things(hypothesis, reference)):
                for label in labels:
                    if label in place:
                        row[kind, place[label]] += 1
        return rows.reshape(len(hypotheses), -1)

    def score(self, found: Rows) -> Figures:
        right, predicted, true = found.reshape(3, -1)  # [labels] each
        by_label = _rates(right, predicted, true)
        averages = {"micro": [float(x[0]) for x in _rates(*(np.array([x.sum()]) for x in (right, predicted, true)))]}
        averages["macro"] = [float(x.mean()) if len(x) else 0.0 for x in by_label]
        averages["weighted"] = [ratio(float(x @ true), float(true.sum())) for x in by_label]
        order = sorted(averages, key=lambda average: average != self.average)
        return {f"{rate}_{a}": averages[a][i] for a in order for i, rate in _FIGURES}

    def by_label(self, rows: Rows) -> dict[Label, Figures]:
        """Precision, recall and F1 of each label, and its support: how often it is true."""
        right, predicted, true = rows.sum(0).reshape(3, -1)
        table = zip(self.labels, *_rates(right, predicted, true), true, strict=True)
        names = ("precision", "recall", "f1", "support")
        return {label: dict(zip(names, map(float, figures), strict=True)) for label, *figures in table}


_FIGURES = ((2, "f1"), (0, "precision"), (1, "recall"))


def _rates(right: Rows, predicted: Rows, true: Rows) -> tuple[Rows, Rows, Rows]:
    """Precision, recall and their harmonic mean, which is also 2 right / (predicted + true)."""

    def share(part: Rows, whole: Rows) -> Rows:
        return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)

    return share(right, predicted), share(right, true), share(2 * right, predicted + true)


@dataclass(frozen=True)
class F1(Tally[Labels, Labels]):
    """Precision, recall and F1 over `labels`: all of them, without "O", or only the positive one, as a task counts."""

    name: ClassVar[str] = "f1"
    labels: tuple[Label, ...]
    average: Average = "macro"

    def things(self, hypothesis: Labels, reference: Labels) -> tuple[Iterable[Label], ...]:
        if isinstance(hypothesis, Set) and isinstance(reference, Set):
            return hypothesis & reference, hypothesis, reference
        predicted, true = _listed(hypothesis), _listed(reference)
        if len(predicted) != len(true):
            raise InputError(f"a sequence of {len(true)} labels has {len(predicted)} predicted ones; give as many")
        return [p for p, t in zip(predicted, true, strict=True) if p == t], predicted, true


@dataclass(frozen=True)
class Matthews(F1):
    """Matthews' correlation, for two classes (Matthews 1975) or any number (Gorodkin 2004).

    0 where one side is constant. `labels` must hold every label that occurs.
    """

    name: ClassVar[str] = "matthews"

    def score(self, found: Rows) -> Figures:
        right, predicted, true = found.reshape(3, -1)
        total = true.sum()
        together = right.sum() * total - predicted @ true
        apart = (total**2 - predicted @ predicted) * (total**2 - true @ true)
        return {"matthews": ratio(together, float(np.sqrt(apart)))}


def confusion(
    hypotheses: Sequence[Label], references: Sequence[Label], labels: Sequence[Label]
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """How often each true label (down) was taken for each other (across)."""
    check_aligned(hypotheses, references)
    place = {label: i for i, label in enumerate(labels)}
    table = np.zeros((len(labels), len(labels)), dtype=np.int64)
    for (hypothesis, reference), count in Counter(zip(hypotheses, references, strict=True)).items():
        if hypothesis not in place or reference not in place:
            stranger = reference if hypothesis in place else hypothesis
            raise InputError(f"label '{stranger}' is not one of the {len(labels)} labels of the table; add it")
        table[place[reference], place[hypothesis]] += count
    return table


def check_sequences(hypotheses: Sequence[Sequence[object]], references: Sequence[Sequence[object]]) -> None:
    """Refuses sequences of labels that are not as long as those that they are held against."""
    check_aligned(hypotheses, references)
    for number, (hypothesis, reference) in enumerate(zip(hypotheses, references, strict=True), 1):
        if len(hypothesis) != len(reference):
            counts = f"{len(hypothesis)} predicted labels for {len(reference)} tokens"
            raise InputError(f"example {number}: {counts}; give one for each")


def _listed(labels: Labels) -> list[Label]:
    return [labels] if isinstance(labels, str | int) else list(labels)


def _same(a: Labels, b: Labels) -> bool:
    if isinstance(a, Set) and isinstance(b, Set):
        return set(a) == set(b)
    return _listed(a) == _listed(b)
