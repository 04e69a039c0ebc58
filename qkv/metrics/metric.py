"""The interface of a metric: statistics of each example, and scores of their sum.

A score such as BLEU is not a mean over examples, but a function of sums over them: n-gram counts, or true and false
positives. A metric therefore computes once what each example adds to those sums. A bootstrap with a thousand resamples
is then one matrix product (`qkv.metrics.significance`), and no metric has to know how a confidence interval is made.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv.errors import InputError

Stats = NDArray[np.float64]  # [examples, k]
Scores = dict[str, float]
Hypothesis = TypeVar("Hypothesis")
Reference = TypeVar("Reference")
DataKind = Literal["texts", "labels", "label_sets", "numbers", "tags", "answers"]
"""What hypotheses and references are.

- texts: a text, and a sequence of reference texts
- labels: one class on each side
- label_sets: a set of classes on each side
- numbers: one number on each side
- tags: the sequence of a sentence's tags on each side
- answers: an answer (None: no prediction), and a sequence of correct answers, empty for an unanswerable question
"""


class Metric(ABC, Generic[Hypothesis, Reference]):
    """A comparison of hypotheses with references. The first of its scores is the one that is usually reported."""

    name: ClassVar[str]
    """Name of the metric in tables and messages; registering a metric sets it."""

    data_kind: ClassVar[DataKind] = "texts"
    """Kind of hypotheses and references, for a metric that is registered by its class."""

    higher_is_better: ClassVar[bool] = True
    """Whether a larger score is a better one, which decides the best checkpoint of a run."""

    is_additive: ClassVar[bool] = True
    """Whether scores are a function of the sum of the statistics. False for rank correlations, for example."""

    decimals: ClassVar[int] = 4
    """Decimal places in tables: 4 for scores between 0 and 1, 2 for scores between 0 and 100."""

    @abstractmethod
    def statistics(self, hypotheses: Sequence[Hypothesis], references: Sequence[Reference]) -> Stats:
        """Return what each example adds to the sums that `score` reads.  # [examples, k]"""

    @abstractmethod
    def score(self, stats: Stats) -> Scores:
        """Return the scores of summed statistics [k], or of all statistics [examples, k] if not `is_additive`."""

    def signature(self, references: Sequence[Reference]) -> str:  # noqa: ARG002
        """Return the settings that a reader needs to reproduce the scores; empty if the name is enough."""
        return ""

    def compute(self, stats: Stats) -> Scores:
        """Return the scores of a whole sample, or of any subset of it."""
        return self.score(stats.sum(0) if self.is_additive else stats)

    def per_example(self, stats: Stats) -> list[Scores]:
        """Return the scores of each example."""
        if not self.is_additive:
            raise InputError(f"{self.name} is a score of a sample and has no value per example; leave it out here")
        return [self.score(row) for row in stats]

    def __call__(self, hypotheses: Sequence[Hypothesis], references: Sequence[Reference]) -> Scores:
        """Return the scores of hypotheses against references."""
        return self.compute(self.statistics(hypotheses, references))


class MeanMetric(Metric[Hypothesis, Reference]):
    """A metric whose scores are means over examples."""

    score_names: ClassVar[tuple[str, ...]] = ()
    """Names of the scores, one per column of `values`; (): one score with the name of the metric."""

    @abstractmethod
    def values(self, hypotheses: Sequence[Hypothesis], references: Sequence[Reference]) -> ArrayLike:
        """Return the scores of each example.  # [examples, scores], or [examples] for one score"""

    def statistics(self, hypotheses: Sequence[Hypothesis], references: Sequence[Reference]) -> Stats:
        check_aligned(hypotheses, references)
        values = np.asarray(self.values(hypotheses, references), dtype=np.float64).reshape(len(hypotheses), -1)
        return np.hstack([values, np.ones((len(hypotheses), 1))])

    def score(self, stats: Stats) -> Scores:
        names = self.score_names or (self.name,)
        return {name: float(total / stats[-1]) for name, total in zip(names, stats[:-1], strict=True)}


def check_aligned(hypotheses: Sequence[Any], references: Sequence[Any]) -> None:
    """Check that there is one reference per hypothesis, and at least one of both."""
    if not len(hypotheses):
        raise InputError("nothing to score: no hypotheses; give at least one")
    if len(hypotheses) != len(references):
        raise InputError(f"{len(hypotheses)} hypotheses and {len(references)} references; give one for each")


def check_texts(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Check that every text has a list of references. Empty texts are allowed."""
    check_aligned(hypotheses, references)
    for number, accepted in enumerate(references, 1):
        if isinstance(accepted, str) or not accepted:
            raise InputError(f"example {number}: no list of references; give it at least one")


def require_package(name: str, purpose: str) -> Any:
    """Import an optional library when it is first needed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise missing_package(purpose, name) from None


def missing_package(purpose: str, module: str) -> InputError:
    """Return the error for an optional library that is not installed."""
    package = module.partition(".")[0].replace("_", "-")
    return InputError(f"{purpose} needs the package {package}; pip install 'qkv[metrics]'")


def safe_divide(numerator: float, denominator: float) -> float:
    """Divide, with 0 for a denominator of 0, as scikit-learn and conlleval do."""
    return float(numerator / denominator) if denominator else 0.0
