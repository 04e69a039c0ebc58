"""Regression: a number for a text, or for two, as in STS-B (Cer et al. 2017; Devlin et al. 2019, 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qkv.data.examples import Labelled
from qkv.errors import InputError
from qkv.evaluate.correlation import Pearson, Spearman
from qkv.evaluate.metric import Metric
from qkv.objectives import label
from qkv.objectives.label import Inputs
from qkv.objectives.term import Term
from qkv.tasks import texts
from qkv.tasks.task import Asked, pack, refuse_others, refuse_unlabelled
from qkv.text.tokeniser import Tokeniser


@dataclass(frozen=True, kw_only=True)
class Rate(texts.OfTexts):
    """See `qkv.tasks.task.Task`."""

    metric: str = "pearson"  # or spearman

    name = "rate"
    kind = "sequence"
    head_fields: ClassVar[dict[str, Any]] = {"several": False}
    example = Labelled

    def decides(self, labels: Sequence[str]) -> str:  # noqa: ARG002
        return self.metric

    def labels(self, examples: Sequence[Labelled]) -> tuple[str, ...]:
        refuse_unlabelled(self, examples, Labelled)
        return ("score",)

    def ask(
        self,
        examples: Sequence[Labelled],
        tokeniser: Tokeniser,
        labels: Sequence[str],  # noqa: ARG002
        longest: int,
    ) -> list[Asked]:
        refuse_others(self.name, examples, Labelled)
        right = [() if one.label is None else (_number(one),) for one in examples]
        return texts.asked(examples, tokeniser, longest, self.too_long, right)

    def prepare(self, asked: Sequence[Asked], segments: bool) -> Inputs:
        source, kinds, _ = pack(asked, segments)
        return Inputs(source, kinds, None, torch.tensor([x for one in asked for x in one.labels]))

    def loss(self, logits: Tensor, batch: Inputs) -> Term:
        return label.numbers(logits, batch)

    def read(self, asked: Sequence[tuple[Asked, Tensor]], example: Labelled, labels: Sequence[str]) -> float:  # noqa: ARG002
        ((_, logits),) = asked
        return float(logits[0, 0])

    def truth(self, example: Labelled) -> float:
        return _number(example)

    def metrics(
        self,
        labels: Sequence[str],  # noqa: ARG002
        predictions: Sequence[float],  # noqa: ARG002
        truths: Sequence[float],  # noqa: ARG002
    ) -> list[Metric[Any, Any]]:
        return [Pearson(), Spearman()]


def _number(example: Labelled) -> float:
    if example.label is None:
        raise InputError(f"{example.where}: has no number; give one")
    if not isinstance(example.label, float | int):
        hint = "correct it, or set data.columns.number: true"
        raise InputError(f"{example.where}: the label {example.label!r} is no number; {hint}")
    return float(example.label)


def make(**settings: Any) -> Rate:
    return Rate(**settings)
