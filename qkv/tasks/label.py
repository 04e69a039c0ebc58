"""Multi-label classification: any number of labels for a text, or for two, each judged for itself.

As in GoEmotions (Demszky et al. 2020), with a sigmoid and binary cross-entropy a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qkv.data.examples import Labelled
from qkv.data.labels import check_labels, labels_of
from qkv.errors import InputError
from qkv.evaluate.classification import F1, Accuracy, label_set
from qkv.evaluate.metric import Metric
from qkv.objectives import label
from qkv.objectives.label import Inputs
from qkv.objectives.term import Term
from qkv.tasks import texts
from qkv.tasks.task import Asked, pack, places, refuse_others, refuse_unlabelled
from qkv.text.tokeniser import Tokeniser


@dataclass(frozen=True, kw_only=True)
class Several(texts.OfTexts):
    """See `qkv.tasks.task.Task`."""

    metric: str = "f1_micro"  # or f1_macro, or accuracy: the share of texts with exactly the right labels
    threshold: float = 0.5  # the probability from which on a label counts

    name = "label"
    kind = "sequence"
    head_fields: ClassVar[dict[str, Any]] = {"several": True}
    example = Labelled

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise InputError(f"task.threshold: a probability between 0 and 1, not {self.threshold}")

    def decides(self, labels: Sequence[str]) -> str:  # noqa: ARG002
        return self.metric

    def labels(self, examples: Sequence[Labelled]) -> tuple[str, ...]:
        refuse_unlabelled(self, examples, Labelled)
        found = labels_of(examples)
        if not found:
            raise InputError(f"{places(examples)}: no example has a label; is it the right column?")
        joined = [one for one in examples if isinstance(one.label, str) and not {",", ";", "|"}.isdisjoint(one.label)]
        if joined and not any(isinstance(one.label, tuple) for one in examples):
            said = f"'{joined[0].label}' would be one label; say what stands between two, as in --column separator=,"
            raise InputError(f"{joined[0].where}: {said}")
        return tuple(found)

    def ask(
        self, examples: Sequence[Labelled], tokeniser: Tokeniser, labels: Sequence[str], longest: int
    ) -> list[Asked]:
        refuse_others(self.name, examples, Labelled)
        check_labels(labels, examples)
        right = [() if one.label is None else tuple(float(name in _of(one)) for name in labels) for one in examples]
        return texts.asked(examples, tokeniser, longest, self.too_long, right)

    def prepare(self, asked: Sequence[Asked], segments: bool) -> Inputs:
        source, kinds, _ = pack(asked, segments)
        return Inputs(source, kinds, None, torch.tensor([one.labels for one in asked if one.labels]))  # [B, labels]

    def loss(self, logits: Tensor, batch: Inputs) -> Term:
        return label.several(logits, batch)

    def read(
        self,
        asked: Sequence[tuple[Asked, Tensor]],
        example: Labelled,  # noqa: ARG002
        labels: Sequence[str],
    ) -> frozenset[str]:
        ((_, logits),) = asked
        chances = torch.sigmoid(logits[0]).tolist()
        return frozenset(name for name, chance in zip(labels, chances, strict=True) if chance >= self.threshold)

    def truth(self, example: Labelled) -> frozenset[str]:
        if example.label is None:
            raise InputError(f"{example.where}: has no labels; give them, or an empty list")
        return _of(example)

    def metrics(
        self, labels: Sequence[str], predictions: Sequence[frozenset[str]], truths: Sequence[frozenset[str]]
    ) -> list[Metric[Any, Any]]:
        return [F1(label_set(labels, predictions, truths), "micro"), Accuracy()]


def _of(example: Labelled) -> frozenset[str]:
    """An example's labels; one alone is a set of one."""
    if isinstance(example.label, float):
        raise InputError(f"{example.where}: the label {example.label} is a number; for numbers there is the task rate")
    return frozenset((example.label,) if isinstance(example.label, str) else example.label or ())


def make(**settings: Any) -> Several:
    return Several(**settings)
