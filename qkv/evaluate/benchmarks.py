"""What GLUE and SuperGLUE report beside the usual: F1 of one class, and exact match over examples that belong together.

Wang et al. 2018 and 2019: the F1 of MRPC and QQP is that of the positive class; MultiRC's are the F1 of the right
answers over all questions, and the share of questions all of whose answers are judged rightly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from qkv.evaluate.classification import F1
from qkv.evaluate.metric import Figures, Metric, Rows, check_aligned


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
    """The share of groups in which every example is right; belongs to a sample, for a group is several examples."""

    name = "exact"
    summed = False

    def statistics(self, hypotheses: Sequence[str], references: Sequence[Member]) -> Rows:
        check_aligned(hypotheses, references)
        number: dict[str, int] = {}
        rows = [
            (number.setdefault(reference.group, len(number)), hypothesis == reference)
            for hypothesis, reference in zip(hypotheses, references, strict=True)
        ]
        return np.array(rows, dtype=np.float64)  # [examples, 2] group, right

    def score(self, found: Rows) -> Figures:
        groups = {group: found[found[:, 0] == group, 1].min() for group in np.unique(found[:, 0])}
        return {"exact": float(np.mean(list(groups.values())))}
