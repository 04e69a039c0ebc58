"""Multiple choice: each option is a sequence of its own with the context, and their scores compete.

As BERT takes SWAG (Devlin et al. 2019, 4.4): the context first, then what stands between it and the option, and the
option. Examples may have different numbers of options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qkv.data.examples import Choice
from qkv.errors import InputError
from qkv.evaluate.classification import Accuracy
from qkv.evaluate.metric import Metric
from qkv.objectives import label
from qkv.objectives.label import Inputs
from qkv.objectives.term import Term
from qkv.tasks import texts
from qkv.tasks.task import Asked, pack, refuse_others, refuse_unlabelled
from qkv.text.tokeniser import Tokeniser


@dataclass(frozen=True, kw_only=True)
class Choose:
    """See `qkv.tasks.task.Task`. A prediction is an option's number, from 0."""

    too_long: texts.TooLong = "truncate"
    metric: str = "accuracy"

    name = "choose"
    kind = "choice"
    head_fields: ClassVar[dict[str, Any]] = {}
    example = Choice

    def decides(self, labels: Sequence[str]) -> str:  # noqa: ARG002
        return self.metric

    def labels(self, examples: Sequence[Choice]) -> tuple[str, ...]:
        refuse_unlabelled(self, examples, Choice)
        return ()

    def ask(
        self,
        examples: Sequence[Choice],
        tokeniser: Tokeniser,
        labels: Sequence[str],  # noqa: ARG002
        longest: int,
    ) -> list[Asked]:
        refuse_others(self.name, examples, Choice)
        found = []
        for number, one in enumerate(examples):
            _check(one)
            between = f"{one.second} " if one.second else ""
            frames = tokeniser.frame_batch([(one.context, between + option) for option in one.options])
            fitting = [texts.fitted(frame, longest, self.too_long, one.where) for frame in frames]
            right = () if one.right is None else (float(one.right),)
            cut = any(cut for _, cut in fitting)
            found.append(Asked.of(number, [frame for frame, _ in fitting], right, cut=cut))
        return found

    def prepare(self, asked: Sequence[Asked], segments: bool) -> Inputs:
        source, kinds, _ = pack(asked, segments)
        right = torch.tensor([int(x) for one in asked for x in one.labels])
        return Inputs(source, kinds, None, right, tuple(len(one.sequences) for one in asked))

    def loss(self, logits: Tensor, batch: Inputs) -> Term:
        return label.choices(logits, batch)

    def read(self, asked: Sequence[tuple[Asked, Tensor]], example: Choice, labels: Sequence[str]) -> int:  # noqa: ARG002
        ((_, logits),) = asked
        return int(logits[:, 0].argmax())

    def truth(self, example: Choice) -> int:
        if example.right is None:
            raise InputError(f"{example.where}: nobody has said which option is right; give its number")
        return example.right

    def metrics(
        self,
        labels: Sequence[str],  # noqa: ARG002
        predictions: Sequence[int],  # noqa: ARG002
        truths: Sequence[int],  # noqa: ARG002
    ) -> list[Metric[Any, Any]]:
        return [Accuracy()]


def _check(example: Choice) -> None:
    if len(example.options) < 2:
        given = "there is one option" if example.options else "there are no options"
        raise InputError(f"{example.where}: {given} to choose from; give at least two")
    if not all(option.strip() for option in example.options):
        raise InputError(f"{example.where}: an option is empty; fill it in, or remove it")
    if example.right is not None and not 0 <= example.right < len(example.options):
        counted = f"the answer is {example.right}, but the options are 0 to {len(example.options) - 1}"
        raise InputError(f"{example.where}: {counted}; correct it")


def make(**settings: Any) -> Choose:
    return Choose(**settings)
