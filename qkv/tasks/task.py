"""What a task is. `find` gives one by its name; adding one touches its own file and the table below."""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from qkv import spec
from qkv.data.batches import evaluation_batches
from qkv.data.examples import Pictured
from qkv.data.images import Images
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
from qkv.weights.folder import AnyModel

Example = TypeVar("Example")
TASKS = {
    "classify": "one of several labels for a text or two",
    "rate": "a number for a text or two",
    "label": "any number of labels for a text",
    "tag": "a tag for each word",
    "answer": "the stretch of a text that answers a question",
    "choose": "one of several options",
    "picture": "one of several labels for a picture",
}


@dataclass(frozen=True)
class Asked:
    """An example, or a part of one, as a model takes it."""

    example: int
    sequences: tuple[Sequence[int], ...]  # one, or one an option
    segments: tuple[Sequence[int], ...]
    labels: tuple[float, ...]  # what is right; () where nobody has said
    at: tuple[int, ...] | None = None  # the tokens that are judged
    about: Any = None  # what a task keeps to read answers off: where tokens stand in the text, whose word a row is of
    cut: bool = False  # the text was longer than the model takes

    @staticmethod
    def of(example: int, frames: Sequence[Framed], labels: tuple[float, ...], **others: Any) -> Asked:
        """From what a tokeniser gave; kept in arrays, for a list has some 40 bytes a token and there are millions."""
        sequences = tuple(array("i", frame.ids) for frame in frames)
        return Asked(example, sequences, tuple(bytes(frame.segments) for frame in frames), labels, **others)

    @property
    def length(self) -> int:
        return sum(map(len, self.sequences))

    def rows(self, at_each_token: bool) -> int:
        """How many rows of logits it gets."""
        if not at_each_token:
            return len(self.sequences)
        return self.length if self.at is None else len(self.at)


class Task(Protocol, Generic[Example]):
    """One task with its settings.

    It may have a method `found_out(examples)` besides: settings that nobody gave and that the training examples tell.
    """

    name: str
    kind: spec.HeadKind  # of the head that it takes
    head_fields: Mapping[str, Any]  # of that head, set whatever the model had there before
    example: type

    def decides(self, labels: Sequence[str]) -> str:
        """The figure by which models are compared where nobody names another; more is better."""
        ...

    def labels(self, examples: Sequence[Example]) -> tuple[str, ...]:
        """The names of the head's outputs."""
        ...

    def ask(self, examples: Sequence[Example], reader: Any, labels: Sequence[str], longest: int) -> list[Asked]:
        """Each example as one or several things that a model of this length takes; for `reader` see `reader_of`."""
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


def refuse_unlabelled(task: Task[Any], examples: Sequence[Any], *kinds: type) -> None:
    """What is learned from has to be of a task's kinds, and somebody has to have said what is right."""
    refuse_others(task.name, examples, *kinds)
    for one in examples:
        task.truth(one)


def refuse_others(name: str, examples: Sequence[Any], *kinds: type) -> None:
    """The examples of some formats are another task's."""
    wrong = next((one for one in examples if not isinstance(one, kinds)), None)
    if wrong is not None:
        wanted, given = " or ".join(kind.__name__ for kind in kinds), type(wrong).__name__
        raise InputError(f"task {name}: takes {wanted} examples, and this format gives {given} ones; see data.format")


def places(examples: Sequence[Any]) -> str:
    """From where to where examples stand, for what is the fault of all and of none alone."""
    return f"{examples[0].where} to {examples[-1].where}"


def put_on(task: Task[Any], model: AnyModel) -> None:
    """Tells a model's head what the task makes of it, so that it is saved with the model."""
    assert model.spec.head is not None
    assert model.head is not None
    model.head.spec = spec.replace(model.spec.head, **task.head_fields)
    model.spec = spec.replace(model.spec, head=model.head.spec)


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
    parts, head = logits_of(task, loaded, examples, budget), loaded.model.spec.head
    assert head is not None  # or there would be no logits
    return [task.read(found, example, head.labels) for found, example in zip(parts, examples, strict=True)]


def logits_of(
    task: Task[Example], loaded: Loaded, examples: Sequence[Example], budget: int = 16384
) -> list[list[tuple[Asked, Tensor]]]:
    """Each example's parts as a model was asked them, with what its head gave for each."""
    model, head = loaded.model, loaded.model.spec.head
    if head is None or head.kind != task.kind:
        raise InputError(f"{task.name}: needs a head of kind '{task.kind}', which this {model.spec.family} lacks")
    asked = task.ask(examples, reader_of(task, loaded), head.labels, input_length(model.spec))
    parts: list[list[tuple[Asked, Tensor]]] = [[] for _ in examples]
    with evaluating(model), torch.inference_mode():
        for rows in evaluation_batches([one.length for one in asked], budget):  # type: ignore[arg-type]
            batch = [asked[row] for row in rows]
            logits = judged(model, to_device(task.prepare(batch, has_segments(model.spec)), model.device))
            sizes = [one.rows(head.at_each_token) for one in batch]
            for one, own in zip(batch, torch.split(logits.float().cpu(), sizes), strict=True):
                parts[one.example].append((one, own))
    return parts


def reader_of(task: Task[Any], loaded: Loaded) -> Tokeniser | Images:
    """What makes of a task's examples what a model takes: its tokeniser, or how its pictures are prepared."""
    check_senses(task, loaded.model.spec)
    reader = loaded.images if task.example is Pictured else loaded.source
    if reader is not None:
        return reader
    said = "a tokeniser, so it cannot read text"
    if task.example is Pictured:
        said = "a preprocessor_config.json, so it cannot read pictures"
    raise InputError(f"this {loaded.model.spec.family} came without {said}")


def check_senses(task: Task[Any], s: spec.Model) -> None:
    """A model reads text, or looks at pictures."""
    sees = isinstance(s.source, spec.Patches)
    if sees != (task.example is Pictured):
        said, other = ("looks at pictures", "picture") if sees else ("reads text", "classify")
        raise InputError(f"task {task.name}: this {s.family} {said}; take another model, or the task {other}")


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
