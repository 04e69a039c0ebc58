"""Regression: one number per text or pair of texts, as in STS-B (Cer et al. 2017; Devlin et al. 2019, 4.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qkv.data.examples import TextExample
from qkv.errors import InputError
from qkv.metrics.correlation import Pearson, Spearman
from qkv.metrics.metric import Metric
from qkv.objectives import classification
from qkv.objectives.classification import Inputs
from qkv.objectives.loss import LossSum
from qkv.tasks import text_inputs
from qkv.tasks.base import check_example_type, check_labeled, location_range
from qkv.tasks.features import FeatureOutputs, Features, pack_features
from qkv.tasks.predictions import Alternative, TaskPrediction
from qkv.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Regression(text_inputs.TextTask):
    """One number per text or pair of texts."""

    metric: str = "pearson"
    """Metric that selects checkpoints: pearson or spearman."""

    name = "regression"
    has_alternatives = False
    head_kind = "sequence"
    metric_data_kind = "numbers"

    @property
    def head_overrides(self) -> Mapping[str, Any]:
        return {"multi_label": False}

    def primary_metric(self, labels: Sequence[str]) -> str:  # noqa: ARG002
        return self.metric

    def labels(self, examples: Sequence[TextExample]) -> tuple[str, ...]:
        check_labeled(self, examples, TextExample)
        values = {self.gold(example) for example in examples}
        if len(values) == 1:  # nothing to learn, and no correlation is defined
            raise InputError(
                f"{location_range(examples)}: all have the label {values.pop():g}; give examples of another, too"
            )
        return ("score",)

    def featurize(
        self,
        examples: Sequence[TextExample],
        tokenizer: Tokenizer,
        labels: Sequence[str],  # noqa: ARG002
        max_length: int,
    ) -> list[Features]:
        check_example_type(self.name, examples, TextExample)
        targets = [() if example.label is None else (_numeric_label(example),) for example in examples]
        return text_inputs.featurize_texts(examples, tokenizer, max_length, self.on_too_long, targets)

    def collate(self, features: Sequence[Features], use_token_types: bool) -> Inputs:
        source, token_type_ids, _ = pack_features(features, use_token_types)
        return Inputs(source, token_type_ids, None, torch.tensor([x for feature in features for x in feature.labels]))

    def loss(self, logits: Tensor, batch: Inputs) -> LossSum:
        return classification.mse(logits, batch)

    def postprocess(self, outputs: FeatureOutputs, example: TextExample, labels: Sequence[str]) -> float:  # noqa: ARG002
        ((_, logits),) = outputs
        return float(logits[0, 0])

    def describe(
        self,
        prediction: float,
        outputs: FeatureOutputs,  # noqa: ARG002
        example: TextExample,  # noqa: ARG002
        labels: Sequence[str],  # noqa: ARG002
        n_best: int,  # noqa: ARG002
    ) -> TaskPrediction:
        text = f"{prediction:.4f}"
        return TaskPrediction(prediction, text, prediction, (Alternative(text, prediction),), {"value": prediction})

    def gold(self, example: TextExample) -> float:
        return _numeric_label(example)

    def metrics(
        self,
        labels: Sequence[str],  # noqa: ARG002
        predictions: Sequence[float],  # noqa: ARG002
        golds: Sequence[float],  # noqa: ARG002
    ) -> list[Metric[Any, Any]]:
        return [Pearson(), Spearman()]


def _numeric_label(example: TextExample) -> float:
    if example.label is None:
        raise InputError(f"{example.location}: has no number; add one")
    if not isinstance(example.label, float | int):
        hint = "correct it, or set data.columns.regression: true"
        raise InputError(f"{example.location}: the label {example.label!r} is not a number; {hint}")
    return float(example.label)
