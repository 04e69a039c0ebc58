"""What a task is. `find` gives one by its name; adding one touches its own file and the table below."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from qkv import spec
from qkv.data.batches import evaluation_batches
from qkv.decode.frames import input_length
from qkv.decode.predict import evaluating
from qkv.errors import InputError, nearest
from qkv.evaluate.metric import Metric
from qkv.nn import Ragged
from qkv.objectives.label import Inputs, judged, packed
from qkv.objectives.term import Term, to_device
from qkv.text.engine import Framed
from qkv.text.tokeniser import Tokeniser
from qkv.weights import Loaded

Example = TypeVar("Example")
TASKS = {
    "classify": "one of several labels for a text or two",
    "rate": "a number for a text or two",
    "label": "any number of labels for a text",
    "tag": "a tag for each word",
    "answer": "the stretch of a text that answers a question",
    "choose": "one of several options",
}


@dataclass(frozen=True)
class Asked:
    """An example, or a part of one, as a model takes it."""

    example: int
    sequences: tuple[Sequence[int], ...]  # one, or one an option
    segments: tuple[Sequence[int], ...]
    labels: tuple[float, ...]  # what is right; () where nobody has said
    at: tuple[int, ...] | None = None  # the tokens that are judged
    frame: Framed | None = None  # where tokens stand in the text, for those who point into it
    cut: bool = False  # the text was longer than the model takes

    @property
    def length(self) -> int:
        return sum(map(len, self.sequences))

    def rows(self, at_each_token: bool) -> int:
        """How many rows of logits it gets."""
        if not at_each_token:
            return len(self.sequences)
        return self.length if self.at is None else len(self.at)


class Task(Protocol, Generic[Example]):
    """One task with its settings."""

    name: str
    kind: spec.HeadKind  # of the head that it takes
    metric: str  # the figure that decides; more is better

    def labels(self, examples: Sequence[Example]) -> tuple[str, ...]:
        """The names of the head's outputs."""
        ...

    def ask(
        self, examples: Sequence[Example], tokeniser: Tokeniser, labels: Sequence[str], longest: int
    ) -> list[Asked]:
        """Each example as one or several things that a model of this length takes."""
        ...

    def prepare(self, asked: Sequence[Asked], segments: bool) -> Inputs: ...

    def loss(self, logits: Tensor, batch: Inputs) -> Term: ...

    def read(self, asked: Sequence[tuple[Asked, Tensor]], example: Example, labels: Sequence[str]) -> Any:
        """The prediction for an example from the logits of its parts."""
        ...

    def truth(self, example: Example) -> Any:
        """What a prediction is compared with."""
        ...

    def metrics(
        self, labels: Sequence[str], predictions: Sequence[Any], truths: Sequence[Any]
    ) -> list[Metric[Any, Any]]: ...


def find(name: str, **settings: Any) -> Task[Any]:
    """A task by its name."""
    if name not in TASKS:
        raise InputError(f"task: there is no '{name}'; {nearest(name, TASKS)}")
    make: Callable[..., Task[Any]] = importlib.import_module(f"qkv.tasks.{name}").make
    return make(**settings)


def pack(asked: Sequence[Asked], segments: bool) -> tuple[Ragged, Tensor | None, Tensor | None]:
    """Ids, segments where the model has them, and the tokens that are judged."""
    ids, lengths = packed([sequence for one in asked for sequence in one.sequences])
    kinds = packed([part for one in asked for part in one.segments])[0] if segments else None
    if asked[0].at is None:
        return Ragged.of(ids, lengths), kinds, None
    places, begin = [], 0
    for one in asked:
        places += [begin + place for place in one.at or ()]
        begin += one.length
    return Ragged.of(ids, lengths), kinds, torch.tensor(places, dtype=torch.long)


def predict(task: Task[Example], loaded: Loaded, examples: Sequence[Example], budget: int = 16384) -> list[Any]:
    """What a model says of each example, in their order."""
    model, tokeniser = loaded.model, loaded.source
    if tokeniser is None:
        raise InputError(f"this {model.spec.family} came without a tokeniser, so it cannot read text")
    head = model.spec.head
    if head is None or head.kind != task.kind:
        raise InputError(f"{task.name}: needs a head of kind '{task.kind}', which this {model.spec.family} lacks")
    asked = task.ask(examples, tokeniser, head.labels, input_length(model.spec))
    parts: list[list[tuple[Asked, Tensor]]] = [[] for _ in examples]
    with evaluating(model), torch.inference_mode():
        for rows in evaluation_batches([one.length for one in asked], budget):  # type: ignore[arg-type]
            batch = [asked[row] for row in rows]
            logits = judged(model, to_device(task.prepare(batch, has_segments(model.spec)), model.device))
            sizes = [one.rows(head.at_each_token) for one in batch]
            for one, own in zip(batch, torch.split(logits.float().cpu(), sizes), strict=True):
                parts[one.example].append((one, own))
    return [task.read(found, example, head.labels) for found, example in zip(parts, examples, strict=True)]


def score(
    task: Task[Example], predictions: Sequence[Any], examples: Sequence[Example], labels: Sequence[str]
) -> dict[str, float]:
    """All figures of a task's metrics."""
    truths = [task.truth(example) for example in examples]
    found: dict[str, float] = {}
    for metric in task.metrics(labels, predictions, truths):
        found |= metric(predictions, truths)
    return found


def has_segments(s: spec.Model) -> bool:
    return s.decoder is None and isinstance(s.source, spec.Embed) and s.source.segments > 0
