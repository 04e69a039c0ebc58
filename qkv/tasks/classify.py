"""Sequence classification: one of several labels for a text, or for two (Devlin et al. 2019, 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qkv.data.examples import Labelled
from qkv.data.labels import check_labels, labels_of
from qkv.errors import InputError
from qkv.evaluate.classification import F1, Accuracy, Matthews, label_set
from qkv.evaluate.metric import Metric
from qkv.objectives import label
from qkv.objectives.label import Inputs
from qkv.objectives.term import Term
from qkv.tasks import texts
from qkv.tasks.task import Asked, pack
from qkv.text.tokeniser import Tokeniser


@dataclass(frozen=True, kw_only=True)
class Classify:
    """See `qkv.tasks.task.Task`."""

    too_long: texts.TooLong = "truncate"
    metric: str = "accuracy"  # accuracy, f1 (macro), or matthews
    weights: tuple[float, ...] | None = None  # of the classes, in the loss
    smoothing: float = 0.0

    name = "classify"
    kind = "sequence"
    example = Labelled

    def labels(self, examples: Sequence[Labelled]) -> tuple[str, ...]:
        return labels_of(examples)

    def ask(
        self, examples: Sequence[Labelled], tokeniser: Tokeniser, labels: Sequence[str], longest: int
    ) -> list[Asked]:
        check_labels(labels, examples)
        number = {name: float(i) for i, name in enumerate(labels)}
        right = [() if one.label is None else (number[str(one.label)],) for one in examples]
        return texts.asked(examples, tokeniser, longest, self.too_long, right)

    def prepare(self, asked: Sequence[Asked], segments: bool) -> Inputs:
        source, kinds, _ = pack(asked, segments)
        return Inputs(source, kinds, None, torch.tensor([int(x) for one in asked for x in one.labels]))

    def loss(self, logits: Tensor, batch: Inputs) -> Term:
        weights = None if self.weights is None else torch.tensor(self.weights, device=logits.device)
        return label.classes(logits, batch, weights, self.smoothing)

    def read(self, asked: Sequence[tuple[Asked, Tensor]], example: Labelled, labels: Sequence[str]) -> str:  # noqa: ARG002
        ((_, logits),) = asked
        return labels[int(logits[0].argmax())]

    def truth(self, example: Labelled) -> str:
        if example.label is None:
            raise InputError(f"{example.where}: has no label to score against; give one")
        return str(example.label)

    def metrics(
        self, labels: Sequence[str], predictions: Sequence[str], truths: Sequence[str]
    ) -> list[Metric[Any, Any]]:
        every = label_set(labels, predictions, truths)
        return [Accuracy(), F1(every, "macro"), Matthews(every)]


def make(**settings: Any) -> Classify:
    return Classify(**settings)
