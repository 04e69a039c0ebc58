"""What a metric is: a name, statistics of each example, and a score of their sum.

A figure such as BLEU is no mean over examples, but it is a function of sums over them: n-gram counts, or true and false
positives. So a metric says for each example what it adds to those sums, once; a thousand resamples then cost a matrix
product (`qkv.evaluate.confidence`), and no metric needs to know how a confidence interval is made.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from qkv.errors import InputError

Rows = NDArray[np.float64]  # [examples, k]
Figures = dict[str, float]
Hypothesis = TypeVar("Hypothesis")
Reference = TypeVar("Reference")


class Metric(ABC, Generic[Hypothesis, Reference]):
    """A measure of hypotheses against references; the first of its figures is the one that is usually reported."""

    name: ClassVar[str]
    summed: ClassVar[bool] = True  # False: a function of the whole sample, such as a rank correlation
    digits: ClassVar[int] = 4  # behind the point: 4 for figures out of 1, 2 for those out of 100

    @abstractmethod
    def statistics(self, hypotheses: Sequence[Hypothesis], references: Sequence[Reference]) -> Rows:
        """What each example adds.  # [examples, k]"""

    @abstractmethod
    def score(self, found: Rows) -> Figures:
        """The figures of the statistics' sum [k]; where `summed` is False, of the statistics themselves."""

    def signature(self, references: Sequence[Reference]) -> str:  # noqa: ARG002
        """What a reader must know to get the same figures again; nothing where the name says it all."""
        return ""

    def of(self, rows: Rows) -> Figures:
        """The figures of a whole sample, or of any part of it."""
        return self.score(rows.sum(0) if self.summed else rows)

    def each(self, rows: Rows) -> list[Figures]:
        """The figures of every example by itself."""
        if not self.summed:
            raise InputError(f"{self.name} belongs to a sample, not to one example; leave it out here")
        return [self.score(row) for row in rows]

    def __call__(self, hypotheses: Sequence[Hypothesis], references: Sequence[Reference]) -> Figures:
        return self.of(self.statistics(hypotheses, references))


class Mean(Metric[Hypothesis, Reference]):
    """A metric that every example has by itself and whose figure is the mean over examples."""

    figures: ClassVar[tuple[str, ...]]

    @abstractmethod
    def values(self, hypotheses: Sequence[Hypothesis], references: Sequence[Reference]) -> Rows:
        """Each example's own figures.  # [examples, figures]"""

    def statistics(self, hypotheses: Sequence[Hypothesis], references: Sequence[Reference]) -> Rows:
        check_aligned(hypotheses, references)
        values = np.asarray(self.values(hypotheses, references), dtype=np.float64).reshape(len(hypotheses), -1)
        return np.hstack([values, np.ones((len(hypotheses), 1))])

    def score(self, found: Rows) -> Figures:
        return {name: float(total / found[-1]) for name, total in zip(self.figures, found[:-1], strict=True)}


def check_aligned(hypotheses: Sequence[Any], references: Sequence[Any]) -> None:
    """Refuses what cannot be scored line by line."""
    if not len(hypotheses):
        raise InputError("nothing to score: no hypotheses; give at least one")
    if len(hypotheses) != len(references):
        raise InputError(f"{len(hypotheses)} hypotheses and {len(references)} references; give one for each")


def check_texts(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Refuses texts without references; an empty text is a text."""
    check_aligned(hypotheses, references)
    for number, accepted in enumerate(references, 1):
        if isinstance(accepted, str) or not accepted:
            raise InputError(f"example {number}: no list of references; give it at least one")


def library(name: str, what: str) -> Any:
    """An optional library, imported where it is first needed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0].replace("_", "-")
        raise InputError(f"{what} needs the package {package}; pip install 'qkv[metrics]'") from None


def ratio(part: float, whole: float) -> float:
    """Part of whole, and 0 of nothing, as scikit-learn and conlleval count."""
    return float(part / whole) if whole else 0.0
