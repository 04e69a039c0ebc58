"""How `predict` answers inputs: by the task that a run was trained for, or by what a model's head says of a text."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.cli.options import load_model, one_of
from qkv.cli.pairs import prefix_of, prefixed
from qkv.cli.streams import Input
from qkv.cli.tasks import trained_for
from qkv.data.examples import Choice, Labelled, Pictured, Question, Tagged
from qkv.data.tags import cut
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.decode import Decoding
    from qkv.tasks.said import Said
    from qkv.tasks.task import Task
    from qkv.weights import Loaded

_BUDGET = 8192  # tokens that a model reads at once


@dataclass(frozen=True)
class Shape:
    """How an answer is printed."""

    as_json: bool
    scored: bool  # each output with its input and its score


def answers(
    model: str, device: str | None, how: dict[str, Any], chosen: dict[str, Any], shape: Shape
) -> TaskAnswers | TextAnswers:
    """What answers for a model. `chosen` are settings that a task's recipe has decided, None where nobody names others.

    A task answers as it was trained and is scored: long texts in windows, several labels by its threshold.
    """
    from qkv.decode import Decoding

    given = {name: value for name, value in chosen.items() if value is not None}
    task = trained_for(model)
    if task is not None:
        return TaskAnswers(_with(task, given), load_model(model, device), how["best"], shape)
    if "too_long" in given:
        one_of("--too-long", given["too_long"], "refuse", "truncate")
    if "word" in given:
        one_of("--word", given["word"], "first", "mean")
    return TextAnswers(load_model(model, device), Decoding(**how, **given), shape, prefix_of(model))


def _with(task: Task[Any], given: dict[str, Any]) -> Task[Any]:
    """A task under other settings; those that it does not have are refused."""
    assert dataclasses.is_dataclass(task)
    known = {one.name for one in dataclasses.fields(task)}
    for name in given:
        if name not in known:
            raise InputError(f"--{name.replace('_', '-')}: the task '{task.name}' has no such setting; leave it out")
    changed: Task[Any] = dataclasses.replace(task, **given)
    return changed


class TaskAnswers:
    """A fine-tuned run: what its task's head says, with probabilities and places in the text."""

    def __init__(self, task: Task[Any], loaded: Loaded, best: int, shape: Shape) -> None:
        if best < 1:
            raise InputError(f"best must be at least 1, not {best}")
        self._task, self._loaded, self._best, self._shape = task, loaded, best, shape
        self._cut = 0

    def __call__(self, inputs: Sequence[Input], first: int) -> list[list[str]]:  # noqa: ARG002  # nothing is drawn
        from qkv.tasks.said import say

        examples = [self._example(one) for one in inputs]
        said = say(self._task, self._loaded, examples, best=self._best, budget=_BUDGET)
        self._cut += sum(one.cut for one in said)
        return [self._lines(given, one) for given, one in zip(inputs, said, strict=True)]

    def _example(self, one: Input) -> Any:
        from qkv.tasks.said import example_of

        if one.example is None:
            return example_of(self._task, one.text, one.where)
        if self._task.kind == "token" and isinstance(one.example, Labelled):  # its spans are what is asked for
            return Tagged(one.example.text, *cut(one.example.text), None, one.where)
        return one.example

    def _lines(self, given: Input, said: Said) -> list[str]:
        if self._shape.as_json:
            return [json.dumps(given.told | said.told, ensure_ascii=False)]
        if not self._shape.scored:
            return [_flat(said.line)]
        ranked = said.ranked or ((said.line, said.confidence or 0.0),)
        return [f"{_flat(given.text)}\t{score:.4f}\t{_flat(name)}" for name, score in ranked]

    def told(self) -> list[str]:
        """What is to be said at the end."""
        many = "1 text was" if self._cut == 1 else f"{self._cut:,} texts were"
        return [f"{many} longer than the model takes, and cut"] if self._cut else []


class TextAnswers:
    """Any other model: what it writes, or what its head says."""

    def __init__(self, loaded: Loaded, how: Decoding, shape: Shape, prefix: str = "") -> None:
        self._loaded, self._how, self._shape, self._spec = loaded, how, shape, loaded.model.spec
        self._prefix = prefix  # that every source had in training

    def __call__(self, inputs: Sequence[Input], first: int) -> list[list[str]]:
        from qkv.decode import predict

        given = [prefixed(self._given(one), self._prefix) for one in inputs]
        found = predict(self._loaded, given, self._how, [one.where for one in inputs], first)
        return [self._lines(one, predictions) for one, predictions in zip(inputs, found, strict=True)]

    @property
    def _judges(self) -> bool:
        """It writes nothing of its own: the chance of what it says is worth reading as a probability."""
        return self._spec.decoder is None or (self._spec.head is not None and self._spec.head.kind != "lm")

    @property
    def _measures(self) -> bool:
        """What it says is a number, not a chance."""
        head = self._spec.head
        return head is not None and head.kind == "sequence" and head.outputs == 1

    def _given(self, one: Input) -> str | tuple[str, ...]:
        """A text, or those that belong together."""
        example = one.example
        if isinstance(example, Pictured):
            if not isinstance(example.picture, Path):
                raise InputError(f"{one.where}: this model takes files of pictures; name its run's folder instead")
            return str(example.picture)
        if isinstance(example, Question):
            return example.question, example.context
        if isinstance(example, Choice):
            between = f"{example.second} " if example.second else ""
            return example.context, *(between + option for option in example.options)
        if example is not None:
            second = getattr(example, "second", None)
            return example.text if second is None else (example.text, second)
        return tuple(one.text.split("\t")) if self._judges and "\t" in one.text else one.text

    def _lines(self, given: Input, found: list[Any]) -> list[str]:
        if self._shape.as_json:
            return [json.dumps(given.told | {"predictions": [asdict(p) for p in found]}, ensure_ascii=False)]
        if not self._shape.scored:
            return [p.text for p in found]
        return [f"{given.text}\t{self._score(p.score)}\t{p.text}" for p in found]

    def _score(self, score: float) -> str:
        return f"{math.exp(score) if self._judges and not self._measures else score:.4f}"

    def told(self) -> list[str]:
        """What is to be said at the end."""
        return []


def _flat(text: str) -> str:
    """In one line, without a tab: a text out of a table may have both."""
    return " ".join(text.split()) if any(sign in text for sign in "\t\n\r") else text
