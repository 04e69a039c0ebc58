"""All that is known about a model on a task's examples: figures with intervals, classes, confusions, worst examples.

`report` makes it of examples with what a model says of them; `as_json` gives it to programs, `qkv.evaluate.page` to
people.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from qkv.data.examples import Choice, Labelled, Pictured, Question, Tagged
from qkv.errors import InputError, nearest
from qkv.evaluate.cases import Case, Judged, case, error
from qkv.evaluate.classification import confusion
from qkv.evaluate.confidence import bootstrap
from qkv.evaluate.metric import Figures, Metric

WORST = 50  # examples that are kept
_AVERAGES = ("macro", "micro", "weighted")
Curve = list[tuple[int, float]]  # steps and values


@dataclass(frozen=True)
class Figure:
    """A value, and between which two the resampled ones lie."""

    value: float
    low: float | None
    high: float | None
    digits: int  # behind the point


@dataclass(frozen=True)
class Confusion:
    """How often each true label (down) was taken for each other (across)."""

    labels: tuple[str, ...]
    table: tuple[tuple[int, ...], ...]
    totals: tuple[int, ...]  # how often each label is true

    def mistakes(self) -> list[tuple[str, str, int]]:
        """True label, predicted label, how often; most frequent first."""
        found = [
            (self.labels[i], self.labels[j], count)
            for i, row in enumerate(self.table)
            for j, count in enumerate(row)
            if i != j and count
        ]
        return sorted(found, key=lambda mistake: -mistake[2])

    def hardest(self, most: int) -> Confusion:
        """Only the labels that have a part in mistakes, of many those with most."""
        table = np.array(self.table).reshape(len(self.labels), -1)
        wrong = table.sum(0) + table.sum(1) - 2 * table.diagonal()
        kept = sorted(sorted(range(len(self.labels)), key=lambda i: -wrong[i])[:most])
        kept = [i for i in kept if wrong[i]]
        return Confusion(
            tuple(self.labels[i] for i in kept),
            tuple(tuple(int(table[i, j]) for j in kept) for i in kept),
            tuple(self.totals[i] for i in kept),
        )


@dataclass(frozen=True)
class Report:
    """See the module."""

    task: str
    examples: int  # that have a label
    unlabelled: int  # that were only predicted
    deciding: str  # the figure that decides
    figures: dict[str, Figure]  # that one first
    resamples: int
    classes: dict[str, Figures] = field(default_factory=dict)  # precision, recall, f1 and support of each
    confusion: Confusion | None = None
    wrong: int = 0  # examples that are not wholly right
    worst: tuple[Case, ...] = ()  # the surest of them first; of numbers the farthest
    run: str = ""
    data: str = ""
    curves: dict[str, Curve] = field(default_factory=dict)
    recipe: str = ""
    notes: tuple[str, ...] = ()

    def hardest_classes(self) -> list[tuple[str, Figures]]:
        """Lowest F1 first; a class that no example has comes last, for it says nothing."""
        return sorted(self.classes.items(), key=lambda one: (not one[1]["support"], one[1]["f1"]))


def report(
    task: str,
    judged: Sequence[Judged],
    metrics: Sequence[Metric[Any, Any]],
    labels: Sequence[str],
    deciding: str,
    *,
    unlabelled: int = 0,
    resamples: int = 1000,
    seed: int = 0,
) -> Report:
    """Scores predictions against truths, by every metric of a task, and finds where they differ."""
    if not judged:
        return Report(task, 0, unlabelled, deciding, {}, 0)
    said, right = [one.prediction for one in judged], [one.truth for one in judged]
    figures: dict[str, Figure] = {}
    classes: dict[str, Figures] = {}
    for metric in metrics:
        rows = metric.statistics(said, right)
        spread = bootstrap(metric, rows, resamples=resamples, seed=seed) if resamples else {}
        for name, value in metric.of(rows).items():
            low, high = (spread[name].low, spread[name].high) if name in spread else (None, None)
            figures[name] = Figure(value, low, high, metric.digits)
        if not classes and hasattr(metric, "by_label"):
            classes = {str(label): values for label, values in metric.by_label(rows).items()}
    if deciding not in figures:
        raise InputError(f"{task} has no figure '{deciding}'; {nearest(deciding, figures)}")
    wrong = sorted(((error(one), one) for one in judged), key=_worst_first)
    wrong = [(far, one) for far, one in wrong if far]
    return Report(
        task,
        len(judged),
        unlabelled,
        deciding,
        {deciding: figures[deciding], **figures},
        resamples,
        classes,
        confused(said, right, labels),
        len(wrong),
        tuple(case(one) for _, one in wrong[:WORST]),
    )


def _worst_first(found: tuple[float, Judged]) -> tuple[float, float]:
    far, one = found
    return -(one.confidence or 0.0), -far


def confused(said: Sequence[Any], right: Sequence[Any], labels: Sequence[str]) -> Confusion | None:
    """The table of labels, or of the tags of all words; None where an example is not one of several labels."""
    pairs: list[tuple[str, str]] = []
    for one, other in zip(said, right, strict=True):
        if isinstance(one, str) and isinstance(other, str):
            pairs.append((one, other))
        elif _sequence(one) and _sequence(other) and len(one) == len(other):
            pairs += zip(one, other, strict=True)
        else:
            return None
    known = set(labels)
    if not pairs or not all(p in known and t in known for p, t in pairs):
        return None
    there = {label for pair in pairs for label in pair}
    kept = tuple(label for label in labels if label in there)
    table = confusion([p for p, _ in pairs], [t for _, t in pairs], kept)
    return Confusion(kept, tuple(tuple(map(int, row)) for row in table), tuple(map(int, table.sum(1))))


def _sequence(what: Any) -> bool:
    return isinstance(what, Sequence) and not isinstance(what, str | Set)


def main_figures(names: Sequence[str], most: int = 4) -> list[str]:
    """Those that a person wants to see first, in their order: one average of F1 says nearly what the others say."""
    kept: list[str] = []
    for name in names:
        stem, _, average = name.rpartition("_")
        same = {f"{stem}_{other}" for other in _AVERAGES if other != average}
        if average not in _AVERAGES or not same & set(kept):
            kept.append(name)
    if len(kept) > most:
        kept = [name for name in kept if name == kept[0] or not name.startswith(("precision", "recall"))]
    return kept[:most]


def has_truth(example: Any) -> bool:
    """Whether somebody has said what is right."""
    if isinstance(example, Labelled | Pictured):
        return example.label is not None
    if isinstance(example, Tagged):
        return example.tags is not None
    if isinstance(example, Question):
        return example.answerable is not None
    return not isinstance(example, Choice) or example.right is not None


def without_truth(example: Any) -> Any:
    """As it is asked where only the prediction counts: a label that training never saw does not matter then."""
    if isinstance(example, Labelled | Pictured):
        return replace(example, label=None)
    if isinstance(example, Tagged):
        return replace(example, tags=None)
    if isinstance(example, Question):
        return replace(example, answers=(), answerable=None)
    return replace(example, right=None) if isinstance(example, Choice) else example


def curves(log: Path, metric: str) -> dict[str, Curve]:
    """The loss in training and the deciding figure on held-out examples, over the steps, of a run's log.jsonl."""
    found: dict[str, Curve] = {"loss": [], metric: []}
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # a run that came without its log has no curves
        return {}
    for line in lines:
        record = _record(line)
        name = {"train": "loss", "valid": metric}.get(str(record.get("kind")))
        value = record.get(name or "")
        if name and isinstance(value, int | float) and math.isfinite(value):
            found[name].append((int(record.get("step", 0)), float(value)))
    return {name: curve for name, curve in found.items() if curve}


def _record(line: str) -> dict[str, Any]:
    """A log's line; what a kill cut short says nothing."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def as_json(found: Report) -> dict[str, Any]:
    """All of it, for programs; what is not a number is null there."""
    told = asdict(found)
    told["figures"] = {
        name: {"value": figure.value, "low": figure.low, "high": figure.high} for name, figure in found.figures.items()
    }
    for one in told["worst"]:
        del one["picture"]  # `where` names it
    if found.confusion is not None:
        mistakes = found.confusion.mistakes()
        told["confusions"] = [dict(zip(("right", "predicted", "count"), one, strict=True)) for one in mistakes]
    cleaned: dict[str, Any] = _finite(told)
    return cleaned


def _finite(what: Any) -> Any:
    if isinstance(what, float):
        return what if math.isfinite(what) else None
    if isinstance(what, Mapping):
        return {key: _finite(value) for key, value in what.items()}
    return [_finite(one) for one in what] if isinstance(what, list | tuple) else what
