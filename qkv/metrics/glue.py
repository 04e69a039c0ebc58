"""Metrics of GLUE and SuperGLUE: F1 of one class, and exact match over groups of examples.

Wang et al. 2018 and 2019. MRPC and QQP report the F1 of the positive class; MultiRC reports the F1 of correct answers
over all questions, and the fraction of questions all of whose answers are classified correctly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from qkv.errors import InputError
from qkv.metrics.classification import F1
from qkv.metrics.metric import Metric, Scores, Stats, check_aligned, safe_divide


class GroupedLabel(str):
    """A label with the group of its example."""

    group: str

    @staticmethod
    def create(label: str, group: str) -> GroupedLabel:
        """Make a label of an example in a group."""
        grouped_label = GroupedLabel(label)
        grouped_label.group = group
        return grouped_label


@dataclass(frozen=True)
class PositiveF1(F1):
    """Precision, recall and F1 of the only class in `labels`."""

    name: ClassVar[str] = "f1"

    def score(self, stats: Stats) -> Scores:
        scores = super().score(stats)
        return {name: scores[f"{name}_micro"] for name in ("f1", "precision", "recall")}


class GroupExactMatch(Metric[str, GroupedLabel]):
    """Fraction of groups in which every example is correct.

    The statistics of a group are in the row of its first example, so that a resample has all of a group or nothing.
    """

    name = "exact_match"
    data_kind = "labels"

    def statistics(self, hypotheses: Sequence[str], references: Sequence[GroupedLabel]) -> Stats:
        check_aligned(hypotheses, references)
        row_of_group: dict[str, int] = {}
        stats = np.zeros((len(references), 2))  # [examples, 2]: group correct, number of groups
        for number, (hypothesis, reference) in enumerate(zip(hypotheses, references, strict=True)):
            group_row = row_of_group.setdefault(reference.group, number)
            if group_row == number:
                stats[number] = 1
            stats[group_row, 0] *= hypothesis == reference
        return stats

    def score(self, stats: Stats) -> Scores:
        return {"exact_match": safe_divide(stats[0], stats[1])}

    def per_example(self, stats: Stats) -> list[Scores]:  # noqa: ARG002
        raise InputError(f"{self.name} is a score of groups and has no value per example; leave it out here")
