"""Multi-label classification: any number of labels per text or pair of texts.

As in GoEmotions (Demszky et al. 2020), with one sigmoid and binary cross-entropy per label.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qkv.data.examples import TextExample
from qkv.data.labels import check_labels, collect_labels
from qkv.errors import InputError
from qkv.metrics.classification import F1, Accuracy, collect_label_set
from qkv.metrics.metric import Metric
from qkv.objectives import classification
from qkv.objectives.classification import Inputs
from qkv.objectives.loss import LossSum
from qkv.tasks import text_inputs
from qkv.tasks.base import check_example_type, check_labeled, location_range
from qkv.tasks.features import FeatureOutputs, Features, pack_features
from qkv.tasks.predictions import TaskPrediction, rank
from qkv.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class MultiLabel(text_inputs.TextTask):
    """Any number of labels per text or pair of texts. A prediction is a set of labels."""

    metric: str = "f1_micro"
    """Metric that selects checkpoints: f1_micro, f1_macro, or accuracy, the fraction of exact label sets."""

    threshold: float = 0.5
    """Probability from which a label is predicted."""

    name = "multi_label"
    head_kind = "sequence"
    metric_data_kind = "label_sets"

    @property
    def head_overrides(self) -> Mapping[str, Any]:
        return {"multi_label": True}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.threshold < 1:
            raise InputError(f"task.threshold: a probability between 0 and 1, not {self.threshold}")

    def primary_metric(self, labels: Sequence[str]) -> str:  # noqa: ARG002
        return self.metric

    def labels(self, examples: Sequence[TextExample]) -> tuple[str, ...]:
        check_labeled(self, examples, TextExample)
        labels = collect_labels(examples)
        if not labels:
            raise InputError(f"{location_range(examples)}: no example has a label; is it the right column?")
        unsplit_examples = [
            example
            for example in examples
            if isinstance(example.label, str) and not {",", ";", "|"}.isdisjoint(example.label)
        ]
        if unsplit_examples and not any(isinstance(example.label, tuple) for example in examples):
            hint = "set the separator, as in --reader-option label_separator=,"
            message = f"'{unsplit_examples[0].label}' would be a single label; {hint}"
            raise InputError(f"{unsplit_examples[0].location}: {message}")
        return tuple(labels)

    def featurize(
        self, examples: Sequence[TextExample], tokenizer: Tokenizer, labels: Sequence[str], max_length: int
    ) -> list[Features]:
        check_example_type(self.name, examples, TextExample)
        check_labels(labels, examples)
        multi_hot_labels = [
            () if example.label is None else tuple(float(name in _example_labels(example)) for name in labels)
            for example in examples
        ]
        return text_inputs.featurize_texts(examples, tokenizer, max_length, self.on_too_long, multi_hot_labels)

    def collate(self, features: Sequence[Features], use_token_types: bool) -> Inputs:
        source, token_type_ids, _ = pack_features(features, use_token_types)
        return Inputs(
            source, token_type_ids, None, torch.tensor([feature.labels for feature in features if feature.labels])
        )  # [B, labels]

    def loss(self, logits: Tensor, batch: Inputs) -> LossSum:
        return classification.multi_label_bce(logits, batch)

    def postprocess(self, outputs: FeatureOutputs, example: TextExample, labels: Sequence[str]) -> frozenset[str]:  # noqa: ARG002
        ((_, logits),) = outputs
        probs = torch.sigmoid(logits[0]).tolist()
        return frozenset(name for name, prob in zip(labels, probs, strict=True) if prob >= self.threshold)

    def describe(
        self,
        prediction: frozenset[str],
        outputs: FeatureOutputs,
        example: TextExample,  # noqa: ARG002
        labels: Sequence[str],
        n_best: int,
    ) -> TaskPrediction:
        ranked = rank(labels, torch.sigmoid(outputs[0][1][0]).tolist())
        predicted = tuple(alternative for alternative in ranked if alternative.text in prediction)
        # the probability of the whole set if labels were independent
        probability = math.prod(prob if name in prediction else 1 - prob for name, prob in ranked)
        fields: dict[str, Any] = {"labels": dict(predicted)}
        if n_best > 1:
            fields["probabilities"] = dict(ranked[:n_best])
        alternatives = ranked[:n_best] if n_best > 1 else predicted
        text = ", ".join(name for name, _ in predicted)
        return TaskPrediction(prediction, text, probability, alternatives, fields, probability)

    def gold(self, example: TextExample) -> frozenset[str]:
        if example.label is None:
            raise InputError(f"{example.location}: has no labels; add them, or an empty list")
        return _example_labels(example)

    def metrics(
        self,
        labels: Sequence[str],  # noqa: ARG002
        predictions: Sequence[frozenset[str]],
        golds: Sequence[frozenset[str]],
    ) -> list[Metric[Any, Any]]:
        return [F1(collect_label_set(predictions, golds), "micro"), Accuracy()]


def _example_labels(example: TextExample) -> frozenset[str]:
    """Return an example's labels as a set, also if it has a single one."""
    if isinstance(example.label, float):
        raise InputError(f"{example.location}: the label {example.label} is a number; use the task regression")
    return frozenset((example.label,) if isinstance(example.label, str) else example.label or ())
