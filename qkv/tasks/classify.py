"""Sequence classification: one of several labels for a text, or for two (Devlin et al. 2019, 4.1).

What is the same whatever has the label, a text or a picture, is `OneOf`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qkv.data.examples import Labelled
from qkv.data.labels import check_labels, labels_of
from qkv.errors import InputError, nearest
from qkv.evaluate.benchmarks import GroupExact, Member, PositiveF1
from qkv.evaluate.classification import F1, Accuracy, Matthews, label_set
from qkv.evaluate.metric import Metric
from qkv.objectives import label
from qkv.objectives.label import Inputs
from qkv.objectives.term import Term
from qkv.tasks import texts
from qkv.tasks.task import Asked, pack, places, refuse_others, refuse_unlabelled
from qkv.text.tokeniser import Tokeniser


@dataclass(frozen=True, kw_only=True)
class OneOf:
    """One of several labels for an example, which has it as a string."""

    metric: str = "accuracy"  # or f1_macro, matthews; f1, of the positive class, where it is named
    weights: tuple[float, ...] | None = None  # of the classes, in the loss
    smoothing: float = 0.0
    positive: str | None = None  # the class whose precision, recall and F1 are reported

    name: ClassVar[str]
    kind = "sequence"
    head_fields: ClassVar[dict[str, Any]] = {"several": False}
    example: ClassVar[type]

    def decides(self, labels: Sequence[str]) -> str:  # noqa: ARG002
        return self.metric

    def labels(self, examples: Sequence[Any]) -> tuple[str, ...]:
        refuse_unlabelled(self, examples, self.example)
        found = tuple(labels_of(examples))
        if self.positive is not None and self.positive not in found:
            hint = nearest(self.positive, found)
            raise InputError(f"task.positive: no example has the label '{self.positive}'; {hint}")
        if len(found) == 1:
            raise InputError(f"{places(examples)}: all have the label '{found[0]}'; give examples of another, too")
        return found

    def right(self, examples: Sequence[Any], labels: Sequence[str]) -> list[tuple[float, ...]]:
        """The number of each example's label; () where nobody has said."""
        refuse_others(self.name, examples, self.example)
        check_labels(labels, examples)
        number = {name: float(i) for i, name in enumerate(labels)}
        return [() if one.label is None else (number[self.truth(one)],) for one in examples]

    def loss(self, logits: Tensor, batch: Inputs) -> Term:
        weights = None if self.weights is None else torch.tensor(self.weights, device=logits.device)
        return label.classes(logits, batch, weights, self.smoothing)

    def read(self, asked: Sequence[tuple[Asked, Tensor]], example: Any, labels: Sequence[str]) -> str:  # noqa: ARG002
        ((_, logits),) = asked
        return labels[int(logits[0].argmax())]

    def truth(self, example: Any) -> str:
        if example.label is None:
            raise InputError(f"{example.where}: has no label; give one")
        if not isinstance(example.label, str):
            other = "rate" if isinstance(example.label, float) else "label"
            raise InputError(f"{example.where}: the label {example.label!r} is not one class; see the task {other}")
        return example.label

    def metrics(
        self, labels: Sequence[str], predictions: Sequence[str], truths: Sequence[str]
    ) -> list[Metric[Any, Any]]:
        every = label_set(labels, predictions, truths)
        found: list[Metric[Any, Any]] = [Accuracy(), F1(every, "macro"), Matthews(every)]
        if self.positive is not None:
            found.append(PositiveF1((self.positive,)))
        return found


def numbers_of(asked: Sequence[Asked]) -> Tensor:
    """What is right, as a loss takes it.  # [B]"""
    return torch.tensor([int(x) for one in asked for x in one.labels])


@dataclass(frozen=True, kw_only=True)
class Classify(OneOf, texts.OfTexts):
    """See `qkv.tasks.task.Task`."""

    mark: bool = False  # the spans that the label is about get a sign on both sides, as WiC and WSC need it

    name = "classify"
    example = Labelled

    def ask(
        self, examples: Sequence[Labelled], tokeniser: Tokeniser, labels: Sequence[str], longest: int
    ) -> list[Asked]:
        right = self.right(examples, labels)
        return texts.asked(examples, tokeniser, longest, self.too_long, right, self.mark)

    def prepare(self, asked: Sequence[Asked], segments: bool) -> Inputs:
        source, kinds, _ = pack(asked, segments)
        return Inputs(source, kinds, None, numbers_of(asked))

    def truth(self, example: Labelled) -> str:
        found = super().truth(example)
        return Member.of(found, example.group) if example.group else found

    def metrics(
        self, labels: Sequence[str], predictions: Sequence[str], truths: Sequence[str]
    ) -> list[Metric[Any, Any]]:
        found = super().metrics(labels, predictions, truths)
        if truths and all(isinstance(truth, Member) for truth in truths):
            found.append(GroupExact())
        return found


def make(**settings: Any) -> Classify:
    return Classify(**settings)
