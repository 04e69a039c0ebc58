"""What a metric is: a name, statistics of each example, and a score of their sum.

A figure such as BLEU is no mean over examples, but it is a function of sums over them: n-gram counts, or true and false
positives. So a metric says for each example what it adds to those sums, once; a thousand resamples then cost a matrix
product (`qkv.metrics.significance`), and no metric needs to know how a confidence interval is made.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from qkv.errors import InputError

Stats = NDArray[np.float64]  # [examples, k]
Scores = dict[str, float]
Hypothesis = TypeVar("Hypothesis")
Reference = TypeVar("Reference")


class Metric(ABC, Generic[Hypothesis, Reference]):
    """A measure of hypotheses against references; the first of its figures is the one that is usually reported."""

    name: ClassVar[str]
    is_additive: ClassVar[bool] = True  # False: a function of the whole sample, such as a rank correlation
    decimals: ClassVar[int] = 4  # behind the point: 4 for figures out of 1, 2 for those out of 100

    @abstractmethod
    def statistics(self, hypotheses: Sequence[Hypothesis], references: Sequence[Reference]) -> Stats:
        """What each example adds.  # [examples, k]"""

    @abstractmethod
    def score(self, stats: Stats) -> Scores:
        """The figures of the statistics' sum [k]; where `is_additive` is False, of the statistics themselves."""

    def signature(self, references: Sequence[Reference]) -> str:  # noqa: ARG002
        """What a reader must know to get the same figures again; nothing where the name says it all."""
        return ""

    def compute(self, stats: Stats) -> Scores:
        """The figures of a whole sample, or of any part of it."""
        return self.score(stats.sum(0) if self.is_additive else stats)

    def per_example(self, stats: Stats) -> list[Scores]:
        """The figures of every example by itself."""
        if not self.is_additive:
            raise InputError(f"{self.name} belongs to a sample, not to one example; leave it out here")
        return [self.score(row) for row in stats]

    def __call__(self, hypotheses: Sequence[Hypothesis], references: Sequence[Reference]) -> Scores:
        return self.compute(self.statistics(hypotheses, references))


class MeanMetric(Metric[Hypothesis, Reference]):
    """A metric that every example has by itself and whose figure is the mean over examples."""

    score_names: ClassVar[tuple[str, ...]]

    @abstractmethod
    def values(self, hypotheses: Sequence[Hypothesis], references: Sequence[Reference]) -> Stats:
        """Each example's own figures.  # [examples, figures]"""

    def statistics(self, hypotheses: Sequence[Hypothesis], references: Sequence[Reference]) -> Stats:
        check_aligned(hypotheses, references)
        values = np.asarray(self.values(hypotheses, references), dtype=np.float64).reshape(len(hypotheses), -1)
        return np.hstack([values, np.ones((len(hypotheses), 1))])

    def score(self, stats: Stats) -> Scores:
        return {name: float(total / stats[-1]) for name, total in zip(self.score_names, stats[:-1], strict=True)}


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


def require_package(name: str, purpose: str) -> Any:
    """An optional library, imported where it is first needed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0].replace("_", "-")
        raise InputError(f"{purpose} needs the package {package}; pip install 'qkv[metrics]'") from None


def safe_divide(numerator: float, denominator: float) -> float:
    """Part of whole, and 0 of nothing, as scikit-learn and conlleval count."""
    return float(numerator / denominator) if denominator else 0.0
