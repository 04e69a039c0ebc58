"""Scores of a model on the labeled examples of a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from qkv.checkpoints.inputs import max_input_length
from qkv.data.examples import Examples
from qkv.data.filtering import filter_invalid
from qkv.errors import InputError
from qkv.metrics.metric import Metric
from qkv.metrics.significance import bootstrap
from qkv.tasks.base import Task, make_metrics
from qkv.tasks.head_outputs import input_processor, require_head
from qkv.tasks.predictions import TaskPrediction
from qkv.tasks.predictor import Predictor

Scores = dict[str, float]
Intervals = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class TaskEvaluation:
    """The predictions for all examples, and what the metrics compare: those of the labeled ones, and the labels."""

    task: Task[Any]
    labels: tuple[str, ...]  # names of the head's outputs
    primary_metric: str
    examples: list[Any]  # all of them, as the task reads them
    predictions: list[TaskPrediction]  # one per example
    labeled_examples: list[Any]
    scored_predictions: list[TaskPrediction]  # one per labeled example, as the metrics read them
    golds: list[Any]
    metrics: list[Metric[Any, Any]]
    skipped: list[str] = field(default_factory=list)  # one line per example that could not be used
    notes: list[str] = field(default_factory=list)  # of the reader, such as a delimiter that was detected

    @property
    def num_unlabeled(self) -> int:
        """Number of examples that are predicted and not scored."""
        return len(self.examples) - len(self.labeled_examples)

    @property
    def num_truncated(self) -> int:
        """Number of examples that exceed the model's maximum length and were cut."""
        return sum(prediction.truncated for prediction in self.predictions)

    def scores(self, resamples: int = 0) -> tuple[Scores, Intervals]:
        """Return all scores, the primary one first, and with `resamples` their 95 % confidence intervals."""
        predictions = [prediction.prediction for prediction in self.scored_predictions]
        scores: Scores = {}
        intervals: Intervals = {}
        for metric in self.metrics:
            stats = metric.statistics(predictions, self.golds)
            scores |= metric.compute(stats)
            estimates = bootstrap(metric, stats, resamples=resamples) if resamples else {}
            intervals |= {name: (interval.low, interval.high) for name, interval in estimates.items()}
        first = {name: scores[name] for name in (self.primary_metric,) if name in scores}
        return first | scores, intervals


def evaluate_task(
    predictor: Predictor, examples: Examples[Any], metric: str | None = None, *, skip_bad: bool = False
) -> TaskEvaluation:
    """Predict all examples, and pair the predictions of the labeled ones with their labels.

    Args:
        predictor: a model whose task has metrics.
        examples: labeled and unlabeled examples.
        metric: the score that comes first, possibly of a registered metric; by default the task's.
        skip_bad: leave out examples that the model cannot read or whose label it does not know.
    """
    task, notes = require_metrics(predictor), examples.notes
    labels = task.output_names(require_head(task, predictor.bundle.model.spec))
    if skip_bad:
        examples = _filter_bad(predictor, task, labels, examples)
    converted = [task.from_example(example) for example in examples]
    predictions = predictor(converted)
    labeled = [(e, p) for e, p in zip(converted, predictions, strict=True) if e.is_labeled]
    golds = [task.gold(example) for example, _ in labeled]
    scored = task.predictions_for_scoring([prediction for _, prediction in labeled], golds)
    primary_metric = metric or task.primary_metric(labels)
    values = [prediction.prediction for prediction in scored]
    metrics = make_metrics(task, labels, values, golds, primary_metric) if golds else []
    labeled_examples = [example for example, _ in labeled]
    fields = (converted, predictions, labeled_examples, scored, golds, metrics, examples.skipped, notes)
    return TaskEvaluation(task, tuple(labels), primary_metric, *fields)


def require_metrics(predictor: Predictor) -> Task[Any]:
    """Return a predictor's task, or refuse one that has no metrics."""
    if not isinstance(predictor.task, Task):
        remedy = "give a model with a head for labels, a language model, or an encoder-decoder"
        raise InputError(f"the task '{predictor.task.name}' of this model has no metrics; {remedy}")
    return predictor.task


def _filter_bad(predictor: Predictor, task: Task[Any], labels: Sequence[str], examples: Examples[Any]) -> Examples[Any]:
    """Leave out examples that the model cannot read."""
    bundle = predictor.bundle
    processor, max_length = input_processor(task, bundle), max_input_length(bundle.model.spec)
    valid = filter_invalid(examples, lambda batch: task.featurize(batch, processor, labels, max_length))
    if not valid:
        raise InputError(f"all examples are bad, the first: {valid.skipped[0]}")
    return valid
