"""Sequence classification: one of several labels for a text, or for two (Devlin et al. 2019, 4.1).

What is the same whatever has the label, a text or a picture, is `SingleLabel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qkv.data.examples import TextExample
from qkv.data.labels import check_labels, collect_labels
from qkv.errors import InputError, did_you_mean
from qkv.metrics.classification import F1, Accuracy, MatthewsCorrelation, collect_label_set
from qkv.metrics.glue import GroupedLabel, GroupExactMatch, PositiveF1
from qkv.metrics.metric import Metric
from qkv.objectives import classification
from qkv.objectives.classification import Inputs
from qkv.objectives.loss import LossSum
from qkv.tasks import text_inputs
from qkv.tasks.base import Features, check_example_type, check_labeled, location_range, pack_features
from qkv.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class SingleLabel:
    """One of several labels for an example, which has it as a string."""

    metric: str = "accuracy"  # or f1_macro, matthews_correlation; f1, of the positive class, where it is named
    class_weights: tuple[float, ...] | None = None  # of the classes, in the loss
    label_smoothing: float = 0.0
    positive_label: str | None = None  # the class whose precision, recall and F1 are reported

    name: ClassVar[str]
    head_kind = "sequence"
    head_overrides: ClassVar[dict[str, Any]] = {"multi_label": False}
    example_type: ClassVar[type]

    def primary_metric(self, labels: Sequence[str]) -> str:  # noqa: ARG002
        return self.metric

    def labels(self, examples: Sequence[Any]) -> tuple[str, ...]:
        check_labeled(self, examples, self.example_type)
        labels = tuple(collect_labels(examples))
        if self.positive_label is not None and self.positive_label not in labels:
            hint = did_you_mean(self.positive_label, labels)
            raise InputError(f"task.positive_label: no example has the label '{self.positive_label}'; {hint}")
        if len(labels) == 1:
            raise InputError(f"{location_range(examples)}: all have the label '{labels[0]}'; give examples of another, too")
        return labels

    def label_ids(self, examples: Sequence[Any], labels: Sequence[str]) -> list[tuple[float, ...]]:
        """The number of each example's label; () where nobody has said."""
        check_example_type(self.name, examples, self.example_type)
        check_labels(labels, examples)
        index_of = {name: float(i) for i, name in enumerate(labels)}
        return [() if example.label is None else (index_of[self.gold(example)],) for example in examples]

    def loss(self, logits: Tensor, batch: Inputs) -> LossSum:
        weights = None if self.class_weights is None else torch.tensor(self.class_weights, device=logits.device)
        return classification.cross_entropy(logits, batch, weights, self.label_smoothing)

    def postprocess(self, outputs: Sequence[tuple[Features, Tensor]], example: Any, labels: Sequence[str]) -> str:  # noqa: ARG002
        ((_, logits),) = outputs
        return labels[int(logits[0].argmax())]

    def gold(self, example: Any) -> str:
        if example.label is None:
            raise InputError(f"{example.location}: has no label; give one")
        if not isinstance(example.label, str):
            other_task = "regression" if isinstance(example.label, float) else "multi_label"
            raise InputError(f"{example.location}: the label {example.label!r} is not one class; see the task {other_task}")
        return example.label

    def metrics(
        self, labels: Sequence[str], predictions: Sequence[str], golds: Sequence[str]
    ) -> list[Metric[Any, Any]]:
        all_labels = collect_label_set(labels, predictions, golds)
        metrics: list[Metric[Any, Any]] = [Accuracy(), F1(all_labels, "macro"), MatthewsCorrelation(all_labels)]
        if self.positive_label is not None:
            metrics.append(PositiveF1((self.positive_label,)))
        return metrics


def label_tensor(features: Sequence[Features]) -> Tensor:
    """What is right, as a loss takes it.  # [B]"""
    return torch.tensor([int(x) for feature in features for x in feature.labels])


@dataclass(frozen=True, kw_only=True)
class TextClassification(SingleLabel, text_inputs.TextInputSettings):
    """See `qkv.tasks.base.Task`."""

    mark_spans: bool = False  # the spans that the label is about get a sign on both sides, as WiC and WSC need it

    name = "text_classification"
    example_type = TextExample

    def featurize(
        self, examples: Sequence[TextExample], tokenizer: Tokenizer, labels: Sequence[str], max_length: int
    ) -> list[Features]:
        label_ids = self.label_ids(examples, labels)
        return text_inputs.featurize_texts(examples, tokenizer, max_length, self.on_too_long, label_ids, self.mark_spans)

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


def make(**settings: Any) -> TextClassification:
    return TextClassification(**settings)
