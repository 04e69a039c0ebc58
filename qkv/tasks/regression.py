"""Regression: a number for a text, or for two, as in STS-B (Cer et al. 2017; Devlin et al. 2019, 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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
from qkv.tasks.base import Features, check_example_type, check_labeled, pack_features
from qkv.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Regression(text_inputs.TextInputSettings):
    """See `qkv.tasks.base.Task`."""

    metric: str = "pearson"  # or spearman

    name = "regression"
    head_kind = "sequence"
    head_overrides: ClassVar[dict[str, Any]] = {"multi_label": False}
    example_type = TextExample

    def primary_metric(self, labels: Sequence[str]) -> str:  # noqa: ARG002
        return self.metric

    def labels(self, examples: Sequence[TextExample]) -> tuple[str, ...]:
        check_labeled(self, examples, TextExample)
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

    def postprocess(self, outputs: Sequence[tuple[Features, Tensor]], example: TextExample, labels: Sequence[str]) -> float:  # noqa: ARG002
        ((_, logits),) = outputs
        return float(logits[0, 0])

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
        raise InputError(f"{example.location}: has no number; give one")
    if not isinstance(example.label, float | int):
        hint = "correct it, or set data.columns.regression: true"
        raise InputError(f"{example.location}: the label {example.label!r} is no number; {hint}")
    return float(example.label)


def make(**settings: Any) -> Regression:
    return Regression(**settings)
