"""What GLUE and SuperGLUE report beside the usual: F1 of one class, and exact match over examples that belong together.

Wang et al. 2018 and 2019: the F1 of MRPC and QQP is that of the positive class; MultiRC's are the F1 of the right
answers over all questions, and the share of questions all of whose answers are judged rightly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from qkv.errors import InputError
from qkv.evaluate.classification import F1
from qkv.evaluate.metric import Figures, Metric, Rows, check_aligned, ratio


class Member(str):
    """A label that knows the group of its example."""

    group: str

    @staticmethod
    def of(label: str, group: str) -> Member:
        made = Member(label)
        made.group = group
        return made


@dataclass(frozen=True)
class PositiveF1(F1):
    """Precision, recall and F1 of the one class in `labels`."""

    name: ClassVar[str] = "f1"

    def score(self, found: Rows) -> Figures:
        figures = super().score(found)
        return {name: figures[f"{name}_micro"] for name in ("f1", "precision", "recall")}


class GroupExact(Metric[str, Member]):
    """The share of groups in which every example is right.

    A group is counted where its first example stands: who draws examples anew, or swaps them, has all of it or nothing.
    """

    name = "exact"

    def statistics(self, hypotheses: Sequence[str], references: Sequence[Member]) -> Rows:
        check_aligned(hypotheses, references)
        first: dict[str, int] = {}
        rows = np.zeros((len(references), 2))  # [examples, 2] all right, one group
        for number, (hypothesis, reference) in enumerate(zip(hypotheses, references, strict=True)):
            place = first.setdefault(reference.group, number)
            if place == number:
                rows[number] = 1
            rows[place, 0] *= hypothesis == reference
        return rows

    def score(self, found: Rows) -> Figures:
        return {"exact": ratio(found[0], found[1])}

    def each(self, rows: Rows) -> list[Figures]:  # noqa: ARG002
        raise InputError(f"{self.name} belongs to groups, not to one example; leave it out here")
