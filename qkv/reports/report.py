"""The evaluation of a model on the examples of a task: scores with intervals, classes, confusions, worst examples.

`build_report` makes a report from scored examples; `to_dict` converts it to JSON values, `qkv.reports.html` to a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qkv.errors import InputError, did_you_mean
from qkv.files import parse_json
from qkv.metrics.classification import confusion_matrix
from qkv.metrics.metric import Metric, Scores
from qkv.metrics.significance import bootstrap
from qkv.reports.error_analysis import ErrorCase, ScoredExample, error_size, make_case

MAX_WORST_EXAMPLES = 50  # wrong examples in a report
_AVERAGES = ("macro", "micro", "weighted")
Curve = list[tuple[int, float]]  # (step, value)


@dataclass(frozen=True)
class MetricEstimate:
    """A score with its confidence interval."""

    value: float
    ci_low: float | None
    """Lower end of the 95 % interval; None without resamples."""
    ci_high: float | None
    """Upper end of the 95 % interval; None without resamples."""
    decimals: int
    """Decimal places in tables."""


@dataclass(frozen=True)
class ConfusionMatrix:
    """Counts of each gold label (rows) predicted as each label (columns)."""

    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    """One row per gold label."""
    support: tuple[int, ...]
    """Number of examples, or words, with each gold label."""

    def mistakes(self) -> list[tuple[str, str, int]]:
        """Return (gold label, predicted label, count) of each confusion, most frequent first."""
        mistakes = [
            (self.labels[i], self.labels[j], count)
            for i, row in enumerate(self.counts)
            for j, count in enumerate(row)
            if i != j and count
        ]
        return sorted(mistakes, key=lambda mistake: -mistake[2])

    def most_confused(self, max_labels: int) -> ConfusionMatrix:
        """Return the matrix of the labels with most mistakes; labels without a mistake are left out."""
        counts = np.array(self.counts).reshape(len(self.labels), -1)
        num_errors = counts.sum(0) + counts.sum(1) - 2 * counts.diagonal()
        indices = sorted(sorted(range(len(self.labels)), key=lambda i: -num_errors[i])[:max_labels])
        indices = [i for i in indices if num_errors[i]]
        return ConfusionMatrix(
            tuple(self.labels[i] for i in indices),
            tuple(tuple(int(counts[i, j]) for j in indices) for i in indices),
            tuple(self.support[i] for i in indices),
        )


@dataclass(frozen=True)
class Report:
    """The evaluation of a model on the examples of a task."""

    task: str
    """Name of the task."""
    num_examples: int
    """Number of labeled examples, which are scored."""
    num_unlabeled: int
    """Number of unlabeled examples, which are only predicted."""
    primary_metric: str
    """Score that selects checkpoints."""
    metrics: dict[str, MetricEstimate]
    """All scores, the primary one first."""
    resamples: int
    """Number of bootstrap resamples of the intervals; 0: no intervals."""
    classes: dict[str, Scores] = field(default_factory=dict)
    """Precision, recall, F1 and support of each class."""
    confusion_matrix: ConfusionMatrix | None = None
    """Confusions of classes; None for tasks without classes."""
    num_wrong: int = 0
    """Number of examples that are not entirely correct."""
    worst_examples: tuple[ErrorCase, ...] = ()
    """Wrong examples, the most confident predictions first; for numbers, the largest errors first."""
    run: str = ""
    """Folder of the run."""
    data: str = ""
    """Name of the data."""
    learning_curves: dict[str, Curve] = field(default_factory=dict)
    """Training loss and primary score over the steps of the run."""
    recipe: str = ""
    """Recipe of the run, as YAML."""
    notes: tuple[str, ...] = ()
    """Remarks on the data, such as the number of truncated texts."""

    def worst_classes(self) -> list[tuple[str, Scores]]:
        """Return the classes, lowest F1 first; classes without an example, whose F1 has no meaning, come last."""
        return sorted(self.classes.items(), key=lambda item: (not item[1]["support"], item[1]["f1"]))


def build_report(
    task: str,
    scored_examples: Sequence[ScoredExample],
    metrics: Sequence[Metric[Any, Any]],
    labels: Sequence[str],
    primary_metric: str,
    *,
    num_unlabeled: int = 0,
    resamples: int = 1000,
    seed: int = 0,
) -> Report:
    """Score predictions with the metrics of a task, and collect confusions and wrong examples.

    Args:
        task: name of the task.
        scored_examples: labeled examples with their predictions.
        metrics: the task's metrics.
        labels: the classes, in the order of the confusion matrix.
        primary_metric: the score that comes first; one of the metrics must report it.
        num_unlabeled: number of further examples without a label.
        resamples: bootstrap resamples of the confidence intervals; 0: no intervals.
        seed: seed of the resamples.
    """
    if not scored_examples:
        return Report(task, 0, num_unlabeled, primary_metric, {}, 0)
    predictions = [scored_example.prediction for scored_example in scored_examples]
    golds = [scored_example.gold for scored_example in scored_examples]
    estimates: dict[str, MetricEstimate] = {}
    classes: dict[str, Scores] = {}
    for metric in metrics:
        stats = metric.statistics(predictions, golds)
        intervals = bootstrap(metric, stats, resamples=resamples, seed=seed) if resamples else {}
        for name, value in metric.compute(stats).items():
            ci_low, ci_high = (intervals[name].low, intervals[name].high) if name in intervals else (None, None)
            estimates[name] = MetricEstimate(value, ci_low, ci_high, metric.decimals)
        if not classes and hasattr(metric, "per_class"):
            classes = {str(label): values for label, values in metric.per_class(stats).items()}
    if primary_metric not in estimates:
        raise InputError(f"{task} has no score '{primary_metric}'; {did_you_mean(primary_metric, estimates)}")
    sized_errors = ((error_size(scored_example), scored_example) for scored_example in scored_examples)
    errors = [error for error in sorted(sized_errors, key=_worst_first) if error[0]]
    return Report(
        task,
        len(scored_examples),
        num_unlabeled,
        primary_metric,
        {primary_metric: estimates[primary_metric], **estimates},
        resamples,
        classes,
        make_confusion_matrix(predictions, golds, labels),
        len(errors),
        tuple(make_case(scored_example) for _, scored_example in errors[:MAX_WORST_EXAMPLES]),
    )


def _worst_first(sized_error: tuple[float, ScoredExample]) -> tuple[float, float]:
    size, scored_example = sized_error
    return -(scored_example.confidence or 0.0), -size


def make_confusion_matrix(
    predictions: Sequence[Any], golds: Sequence[Any], labels: Sequence[str]
) -> ConfusionMatrix | None:
    """Count confusions of classes, or of the tags of all words; None if predictions are neither."""
    pairs: list[tuple[str, str]] = []
    for prediction, gold in zip(predictions, golds, strict=True):
        if isinstance(prediction, str) and isinstance(gold, str):
            pairs.append((prediction, gold))
        elif _is_sequence(prediction) and _is_sequence(gold) and len(prediction) == len(gold):
            pairs += zip(prediction, gold, strict=True)
        else:
            return None
    known_labels = set(labels)
    if not pairs or not all(p in known_labels and t in known_labels for p, t in pairs):
        return None
    occurring_labels = {label for pair in pairs for label in pair}
    shown_labels = tuple(label for label in labels if label in occurring_labels)
    table = confusion_matrix([p for p, _ in pairs], [t for _, t in pairs], shown_labels)
    return ConfusionMatrix(shown_labels, tuple(tuple(map(int, row)) for row in table), tuple(map(int, table.sum(1))))


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | Set)


def headline_metrics(names: Sequence[str], max_names: int = 4) -> list[str]:
    """Return the most informative scores, in their order, with only one of the averages of F1."""
    selected: list[str] = []
    for name in names:
        stem, _, average = name.rpartition("_")
        siblings = {f"{stem}_{other}" for other in _AVERAGES if other != average}
        if average not in _AVERAGES or not siblings & set(selected):
            selected.append(name)
    if len(selected) > max_names:
        selected = [name for name in selected if name == selected[0] or not name.startswith(("precision", "recall"))]
    return selected[:max_names]


def read_learning_curves(log_path: Path, metric: str) -> dict[str, Curve]:
    """Read the training loss and a validation score over the steps from a run's log.jsonl; {} without a log."""
    curves_by_name: dict[str, Curve] = {"loss": [], metric: []}
    try:
        lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # the run was copied without its log
        return {}
    for line in lines:
        record = _parse_record(line)
        name = {"train": "loss", "valid": metric}.get(str(record.get("kind")))
        value = record.get(name or "")
        step = record.get("step")
        if name and isinstance(step, int) and isinstance(value, int | float) and math.isfinite(value):
            curves_by_name[name].append((step, float(value)))
    return {name: curve for name, curve in curves_by_name.items() if curve}


def _parse_record(line: str) -> dict[str, Any]:
    """Parse a line of a log; {} for a line that was cut when the run was killed."""
    try:
        record = parse_json(line, "the log", allow_nan=True)
    except InputError:
        return {}
    return record if isinstance(record, dict) else {}


def to_dict(report: Report) -> dict[str, Any]:
    """Return a report as JSON values, with null for NaN and infinite numbers."""
    fields = asdict(report)
    for estimate in fields["metrics"].values():
        del estimate["decimals"]
    for entry in fields["worst_examples"]:
        del entry["image"]  # large, and `location` identifies the image
    if report.confusion_matrix is not None:
        mistakes = report.confusion_matrix.mistakes()
        fields["confusions"] = [dict(zip(("gold", "predicted", "count"), entry, strict=True)) for entry in mistakes]
    cleaned: dict[str, Any] = _replace_non_finite(fields)
    return cleaned


def _replace_non_finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: _replace_non_finite(value) for key, value in data.items()}
    return [_replace_non_finite(item) for item in data] if isinstance(data, list | tuple) else data
