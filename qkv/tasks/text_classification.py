"""Sequence classification: one label per text or pair of texts (Devlin et al. 2019, 4.1).

`SingleLabel` is the part that does not depend on the modality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qkv import spec
from qkv.data.examples import TextExample
from qkv.data.labels import check_labels, collect_labels
from qkv.errors import InputError, did_you_mean
from qkv.metrics.classification import F1, Accuracy, MatthewsCorrelation, collect_label_set
from qkv.metrics.glue import GroupedLabel, GroupExactMatch, PositiveF1
from qkv.metrics.metric import DataKind, Metric
from qkv.objectives import classification
from qkv.objectives.classification import Inputs
from qkv.objectives.loss import LossSum
from qkv.tasks import text_inputs
from qkv.tasks.base import ExampleT, Task, check_example_type, check_labeled, location_range
from qkv.tasks.features import FeatureOutputs, Features, pack_features
from qkv.tasks.predictions import TaskPrediction, rank
from qkv.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class SingleLabel(Task[ExampleT]):
    """Classification of an example whose label is a string."""

    metric: str = "accuracy"
    """Metric that selects checkpoints: accuracy, f1_macro, matthews_correlation, or, with `positive_label`, f1."""

    class_weights: tuple[float, ...] | None = None
    """Weight of each class in the loss; None: all 1."""

    label_smoothing: float = 0.0
    """Probability that the target distribution spreads over all classes."""

    positive_label: str | None = None
    """Class whose precision, recall and F1 are reported; None: no class."""

    head_kind: ClassVar[spec.HeadKind] = "sequence"
    metric_data_kind: ClassVar[DataKind | None] = "labels"

    @property
    def head_overrides(self) -> Mapping[str, Any]:
        return {"multi_label": False}

    def primary_metric(self, labels: Sequence[str]) -> str:  # noqa: ARG002
        return self.metric

    def labels(self, examples: Sequence[Any]) -> tuple[str, ...]:
        check_labeled(self, examples, self.example_type)
        labels = tuple(collect_labels(examples))
        if self.positive_label is not None and self.positive_label not in labels:
            hint = did_you_mean(self.positive_label, labels)
            raise InputError(f"task.positive_label: no example has the label '{self.positive_label}'; {hint}")
        if len(labels) == 1:
            raise InputError(
                f"{location_range(examples)}: all have the label '{labels[0]}'; give examples of another label, too"
            )
        return labels

    def label_ids(self, examples: Sequence[Any], labels: Sequence[str]) -> list[tuple[float, ...]]:
        """Return the index of each example's label, () for an unlabeled example."""
        check_example_type(self.name, examples, self.example_type)
        check_labels(labels, examples)
        index_of = {name: float(i) for i, name in enumerate(labels)}
        return [() if example.label is None else (index_of[self.gold(example)],) for example in examples]

    def loss(self, logits: Tensor, batch: Inputs) -> LossSum:
        weights = None if self.class_weights is None else torch.tensor(self.class_weights, device=logits.device)
        return classification.cross_entropy(logits, batch, weights, self.label_smoothing)

    def postprocess(self, outputs: FeatureOutputs, example: ExampleT, labels: Sequence[str]) -> str:  # noqa: ARG002
        ((_, logits),) = outputs
        return labels[int(logits[0].argmax())]

    def describe(
        self,
        prediction: str,
        outputs: FeatureOutputs,
        example: ExampleT,  # noqa: ARG002
        labels: Sequence[str],
        n_best: int,
    ) -> TaskPrediction:
        return describe_label(prediction, labels, torch.softmax(outputs[0][1][0], -1).tolist(), n_best)

    def gold(self, example: Any) -> str:
        if example.label is None:
            raise InputError(f"{example.location}: has no label; add one")
        if isinstance(example.label, tuple) and len(example.label) == 1:  # one-hot columns
            return str(example.label[0])
        if not isinstance(example.label, str):
            other_task = "regression" if isinstance(example.label, float) else "multi_label"
            raise InputError(
                f"{example.location}: the label {example.label!r} is not a single class; see the task {other_task}"
            )
        return example.label

    def metrics(
        self,
        labels: Sequence[str],  # noqa: ARG002
        predictions: Sequence[str],
        golds: Sequence[str],
    ) -> list[Metric[Any, Any]]:
        label_set = collect_label_set(predictions, golds)  # as scikit-learn: other labels are in no average
        metrics: list[Metric[Any, Any]] = [Accuracy(), F1(label_set, "macro"), MatthewsCorrelation(label_set)]
        if self.positive_label is not None:
            metrics.append(PositiveF1((self.positive_label,)))
        return metrics


def label_tensor(features: Sequence[Features]) -> Tensor:
    """Return the class indices of all features.  # [B]"""
    return torch.tensor([int(x) for feature in features for x in feature.labels])


def describe_label(prediction: str, labels: Sequence[str], probs: Sequence[float], n_best: int) -> TaskPrediction:
    """Format a predicted class with the probabilities of the n best classes."""
    ranked, probability = rank(labels, probs)[:n_best], probs[labels.index(prediction)]
    fields: dict[str, Any] = {"label": prediction, "probability": probability}
    if n_best > 1:
        fields["probabilities"] = dict(ranked)
    return TaskPrediction(prediction, prediction, probability, ranked, fields, probability)


@dataclass(frozen=True, kw_only=True)
class TextClassification(SingleLabel[TextExample], text_inputs.TextTask):
    """One label per text or pair of texts."""

    mark_spans: bool = False
    """Put markers around the spans that the label is about, as WiC and WSC need."""

    name = "text_classification"
    example_type = TextExample

    def featurize(
        self, examples: Sequence[TextExample], tokenizer: Tokenizer, labels: Sequence[str], max_length: int
    ) -> list[Features]:
        label_ids = self.label_ids(examples, labels)
        return text_inputs.featurize_texts(
            examples, tokenizer, max_length, self.on_too_long, label_ids, self.mark_spans
        )

    def collate(self, features: Sequence[Features], use_token_types: bool) -> Inputs:
        source, token_type_ids, _ = pack_features(features, use_token_types)
        return Inputs(source, token_type_ids, None, label_tensor(features))

    def gold(self, example: TextExample) -> str:
        gold = super().gold(example)
        return GroupedLabel.create(gold, example.group) if example.group else gold

    def metrics(
        self, labels: Sequence[str], predictions: Sequence[str], golds: Sequence[str]
    ) -> list[Metric[Any, Any]]:
        metrics = super().metrics(labels, predictions, golds)
        if golds and all(isinstance(gold, GroupedLabel) for gold in golds):
            metrics.append(GroupExactMatch())
        return metrics
