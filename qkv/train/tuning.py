"""Learning a task: its examples, a model that is there under the task's head, the task's own metrics."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qkv import spec
from qkv.data.batches import Endless, Ints, Place, even_edges
from qkv.data.examples import Examples
from qkv.data.pair import unit_hash
from qkv.data.tasks import read
from qkv.decode.frames import input_length
from qkv.errors import InputError, nearest
from qkv.objectives.label import judged
from qkv.objectives.term import Term
from qkv.tasks.task import Asked, Task, find, has_segments, predict, score
from qkv.text.tokeniser import Tokeniser
from qkv.train.sections import TaskData, TaskRecipe
from qkv.weights.folder import SOURCE, AnyModel, Loaded, load

PARTS = {"valid": "dev"}  # what a format calls a part, where it calls it otherwise


@dataclass(frozen=True, eq=False)
class AskedBatch:
    """Some examples of a batch."""

    asked: list[Asked]

    @property
    def tokens(self) -> int:
        return sum(one.length for one in self.asked)

    def split(self, parts: int) -> list[AskedBatch]:
        """Cut into at most `parts` consecutive batches of about equal token count."""
        ends = np.cumsum([one.length for one in self.asked]).tolist()
        edges = even_edges(ends, min(parts, len(self.asked)))
        return [AskedBatch(self.asked[begin:end]) for begin, end in pairwise(edges)]


class AskedBatches(Endless[AskedBatch]):
    """The endless run of batches of a task's examples."""

    def __init__(self, asked: Sequence[Asked], budget: int, seed: int, workers: int = 0) -> None:
        super().__init__(budget, seed, workers)
        self._asked = asked
        self._sizes = np.array([one.length for one in asked], dtype=np.int64)

    def _lengths(self, epoch: int) -> tuple[Ints, Ints]:  # noqa: ARG002  # the same in every epoch
        return self._sizes, np.zeros_like(self._sizes)

    def _take(self, epoch: int, indices: Ints) -> AskedBatch:  # noqa: ARG002
        return AskedBatch([self._asked[index] for index in indices])


@dataclass(frozen=True, eq=False)
class TaskWork:
    """See `qkv.train.work.Work`."""

    recipe: TaskRecipe
    task: Task[Any]
    start: AnyModel  # as it was loaded, or fresh
    tokeniser: Tokeniser
    asked: list[Asked]
    valid: Sequence[Any]
    notes: tuple[str, ...]

    kinds = ("loss",)
    more_is_better = True

    @property
    def spec(self) -> spec.Model:
        return self.start.spec

    @property
    def metric(self) -> str:
        return self.recipe.valid.metric or self.task.metric

    @property
    def _labels(self) -> tuple[str, ...]:
        assert self.spec.head is not None
        return self.spec.head.labels

    def digest(self) -> str:
        told = repr([(one.sequences, one.labels, one.at) for one in self.asked])
        return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()

    def check(self) -> None:
        self._batches.in_epoch(0)

    def write_down(self, folder: Path) -> None:
        self.tokeniser.save(folder / SOURCE)

    def from_place(self, epoch: int, index: int) -> Iterator[tuple[Place, AskedBatch]]:
        return self._batches.from_place(epoch, index)

    @cached_property
    def _batches(self) -> AskedBatches:
        how = self.recipe.train
        return AskedBatches(self.asked, how.batch_tokens, self.recipe.seed, how.workers)

    def prepare(self, part: AskedBatch, step: int) -> Any:  # noqa: ARG002
        return self.task.prepare(part.asked, has_segments(self.spec))

    def losses(self, model: AnyModel, part: Any) -> tuple[Term, ...]:
        return (self.task.loss(judged(model, part), part),)

    def model(self) -> AnyModel:
        return self.start

    def score(self, model: AnyModel) -> dict[str, float]:
        loaded = Loaded(model, self.tokeniser, self.tokeniser)
        found = score(self.task, predict(self.task, loaded, self.valid), self.valid, self._labels)
        if self.metric not in found:
            raise InputError(f"valid.metric: {self.task.name} has no '{self.metric}'; {nearest(self.metric, found)}")
        return found

    def say(self, model: AnyModel) -> list[str]:  # noqa: ARG002
        return []


def read_part(data: TaskData, part: str) -> Examples[Any]:
    """The examples of `train`, `valid` or `test`: of their own file, of a folder's own part, or held out of `train`."""
    path = getattr(data, part)
    held = path is None and part in data.hold_out
    named = data.train if path is None else path
    files = named if isinstance(named, list) else [named]
    if path is None and not held and not all(Path(file).is_dir() for file in files):
        raise InputError(f"the recipe has no '{part}' data; give data.{part}, or a share under data.hold_out")
    found: Examples[Any] = Examples()
    for file in files:
        own = "train" if held else PARTS.get(part, part)  # of a folder; a file is taken whole
        some = read(data.format, file, part=own, columns=data.columns, skip_bad=data.skip_bad)
        found.extend(some)
        found.skipped += some.skipped
    if held or (part == "train" and data.hold_out):
        return Examples([one for one in found if _part_of(one, data) == part], found.skipped)
    return found


def _part_of(example: Any, data: TaskData) -> str:
    """By a hash of what it says, so that new lines never move old ones."""
    told = replace(example, where="") if hasattr(example, "where") else example
    place, below = unit_hash(repr(told)), 0.0
    for name in sorted(data.hold_out):
        below += data.hold_out[name]
        if place < below and getattr(data, name) is None:
            return name
    return "train"


def prepare(recipe: TaskRecipe) -> TaskWork:
    """Reads the examples and loads the model that the recipe starts from, under the head of its task."""
    settings = dict(recipe.task)
    name = settings.pop("name", None)
    if name is None:
        raise InputError("key 'task.name' is missing")
    task = _task(str(name), settings)
    train, valid = read_part(recipe.data, "train"), read_part(recipe.data, "valid")
    if not train or not valid:
        raise InputError(f"no {'training' if not train else 'validation'} examples; see data.train and data.valid")
    labels = task.labels(train)
    torch.manual_seed(recipe.seed)  # a fresh head is drawn
    loaded = load(recipe.model["from"], head=task.kind, labels=labels)
    if loaded.source is None:
        raise InputError(f"{recipe.model['from']}: has no tokeniser; name a model that has one")
    if recipe.tune.class_weights == "balanced":
        task = _task(str(name), settings | {"weights": _balanced(task, train, labels)})
    longest = input_length(loaded.model.spec)
    asked = task.ask(train, loaded.source, labels, longest)
    if recipe.valid.examples is not None and recipe.valid.examples < len(valid):
        valid = Examples(valid[i * len(valid) // recipe.valid.examples] for i in range(recipe.valid.examples))
    task.ask(valid, loaded.source, labels, longest)  # what cannot be read is said before training, not hours into it
    return TaskWork(recipe, task, loaded.model, loaded.source, asked, valid, _notes(train, valid, asked, longest))


def _task(name: str, settings: dict[str, Any]) -> Task[Any]:
    try:
        return find(name, **settings)
    except TypeError as error:
        raise InputError(f"task: {name}: {error}") from None


def _balanced(task: Task[Any], train: Sequence[Any], labels: Sequence[str]) -> tuple[float, ...]:
    """Inverse to how often a class is there; their mean over examples is one."""
    counts = Counter(task.truth(example) for example in train)
    if not all(counts[label] for label in labels):
        raise InputError("tune.class_weights: goes with tasks that choose one class; leave it at none")
    return tuple(len(train) / (len(labels) * counts[label]) for label in labels)


def _notes(train: Examples[Any], valid: Examples[Any], asked: Sequence[Asked], longest: int) -> tuple[str, ...]:
    cut = sum(one.cut for one in asked)
    found = [f"{len(train):,} training and {len(valid):,} validation examples"]
    if cut:
        found.append(f"{cut:,} of the training texts are longer than the model's {longest} tokens and are cut")
    skipped = [*train.skipped, *valid.skipped]
    if skipped:
        found += [f"{len(skipped):,} examples were skipped:", *(f"  {reason}" for reason in skipped[:20])]
    return tuple(found)
