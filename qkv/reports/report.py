"""All that is known about a model on a task's examples: figures with intervals, classes, confusions, worst examples.

`build_report` makes it of examples with what a model says of them; `to_dict` gives it to programs, `qkv.reports.html` to
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

from qkv.data.examples import ImageExample, MultipleChoiceExample, QAExample, TaggedExample, TextExample
from qkv.errors import InputError, did_you_mean
from qkv.metrics.classification import confusion_matrix
from qkv.metrics.metric import Metric, Scores
from qkv.metrics.significance import bootstrap
from qkv.reports.error_analysis import ErrorCase, ScoredExample, error_size, make_case

MAX_WORST_EXAMPLES = 50  # examples that are kept
_AVERAGES = ("macro", "micro", "weighted")
Curve = list[tuple[int, float]]  # steps and values


@dataclass(frozen=True)
class MetricEstimate:
    """A value, and between which two the resampled ones lie."""

    value: float
    ci_low: float | None
    ci_high: float | None
    decimals: int  # behind the point


@dataclass(frozen=True)
class ConfusionMatrix:
    """How often each true label (down) was taken for each other (across)."""

    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    support: tuple[int, ...]  # how often each label is true

    def mistakes(self) -> list[tuple[str, str, int]]:
        """True label, predicted label, how often; most frequent first."""
        mistakes = [
            (self.labels[i], self.labels[j], count)
            for i, row in enumerate(self.counts)
            for j, count in enumerate(row)
            if i != j and count
        ]
        return sorted(mistakes, key=lambda mistake: -mistake[2])

    def most_confused(self, max_labels: int) -> ConfusionMatrix:
        """Only the labels that have a part in mistakes, of many those with most."""
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
    """See the module."""

    task: str
    num_examples: int  # that have a label
    num_unlabeled: int  # that were only predicted
    primary_metric: str  # the figure that decides
    metrics: dict[str, MetricEstimate]  # that one first
    resamples: int
    classes: dict[str, Scores] = field(default_factory=dict)  # precision, recall, f1 and support of each
    confusion_matrix: ConfusionMatrix | None = None
    num_wrong: int = 0  # examples that are not wholly right
    worst_examples: tuple[ErrorCase, ...] = ()  # the surest of them first; of numbers the farthest
    run: str = ""
    data: str = ""
    learning_curves: dict[str, Curve] = field(default_factory=dict)
    recipe: str = ""
    notes: tuple[str, ...] = ()

    def worst_classes(self) -> list[tuple[str, Scores]]:
        """Lowest F1 first; a class that no example has comes last, for it says nothing."""
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
    """Scores predictions against truths, by every metric of a task, and finds where they differ."""
    if not scored_examples:
        return Report(task, 0, num_unlabeled, primary_metric, {}, 0)
    predictions, golds = [scored_example.prediction for scored_example in scored_examples], [scored_example.gold for scored_example in scored_examples]
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
        raise InputError(f"{task} has no figure '{primary_metric}'; {did_you_mean(primary_metric, estimates)}")
    errors = sorted(((error_size(scored_example), scored_example) for scored_example in scored_examples), key=_worst_first)
    errors = [(size, scored_example) for size, scored_example in errors if size]
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


def make_confusion_matrix(predictions: Sequence[Any], golds: Sequence[Any], labels: Sequence[str]) -> ConfusionMatrix | None:
    """The table of labels, or of the tags of all words; None where an example is not one of several labels."""
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
    """Those that a person wants to see first, in their order: one average of F1 says nearly what the others say."""
    selected: list[str] = []
    for name in names:
        stem, _, average = name.rpartition("_")
        siblings = {f"{stem}_{other}" for other in _AVERAGES if other != average}
        if average not in _AVERAGES or not siblings & set(selected):
            selected.append(name)
    if len(selected) > max_names:
        selected = [name for name in selected if name == selected[0] or not name.startswith(("precision", "recall"))]
    return selected[:max_names]


def is_labeled(example: Any) -> bool:
    """Whether somebody has said what is right."""
    if isinstance(example, TextExample | ImageExample):
        return example.label is not None
    if isinstance(example, TaggedExample):
        return example.tags is not None
    if isinstance(example, QAExample):
        return example.answerable is not None
    return not isinstance(example, MultipleChoiceExample) or example.label is not None


def strip_label(example: Any) -> Any:
    """As it is asked where only the prediction counts: a label that training never saw does not matter then."""
    if isinstance(example, TextExample | ImageExample):
        return replace(example, label=None)
    if isinstance(example, TaggedExample):
        return replace(example, tags=None)
    if isinstance(example, QAExample):
        return replace(example, answers=(), answerable=None)
    return replace(example, label=None) if isinstance(example, MultipleChoiceExample) else example


def read_learning_curves(log_path: Path, metric: str) -> dict[str, Curve]:
    """The loss in training and the deciding figure on held-out examples, over the steps, of a run's log.jsonl."""
    curves_by_name: dict[str, Curve] = {"loss": [], metric: []}
    try:
        lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # a run that came without its log has no curves
        return {}
    for line in lines:
        record = _parse_record(line)
        name = {"train": "loss", "valid": metric}.get(str(record.get("kind")))
        value = record.get(name or "")
        if name and isinstance(value, int | float) and math.isfinite(value):
            curves_by_name[name].append((int(record.get("step", 0)), float(value)))
    return {name: curve for name, curve in curves_by_name.items() if curve}


def _parse_record(line: str) -> dict[str, Any]:
    """A log's line; what a kill cut short says nothing."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def to_dict(report: Report) -> dict[str, Any]:
    """All of it, for programs; what is not a number is null there."""
    fields = asdict(report)
    fields["metrics"] = {
        name: {"value": estimate.value, "ci_low": estimate.ci_low, "ci_high": estimate.ci_high} for name, estimate in report.metrics.items()
    }
    for entry in fields["worst_examples"]:
        del entry["image"]  # `location` names it
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
