"""Learning a task: its examples, a model that is there under the task's head, the task's own metrics."""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qkv import families, spec
from qkv.data.batches import Endless, Ints, Place, even_edges
from qkv.data.examples import Examples, Labelled, Tagged
from qkv.data.labels import check_labels
from qkv.decode.frames import input_length
from qkv.errors import InputError, nearest
from qkv.families import bert
from qkv.nn import Decoder, build
from qkv.nn.model import altered
from qkv.objectives.label import judged, language
from qkv.objectives.term import Term
from qkv.tasks.benchmarks import usual
from qkv.tasks.task import Asked, Task, find, has_segments, predict, put_on, score
from qkv.text.tokeniser import Tokeniser
from qkv.train.checkpoint import has_last
from qkv.train.reading import chosen_tokeniser, marks_of
from qkv.train.recipe import shape
from qkv.train.sections import TaskRecipe, Vocabulary
from qkv.train.task_data import read_part, texts
from qkv.weights.adapters import check_notes, digest, write_notes
from qkv.weights.folder import SOURCE, AnyModel, Loaded, load

__all__ = ["TaskWork", "prepare", "read_part"]

_LISTED = 20  # examples that were skipped, each in a line


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
    base: str | None = None  # of a model with adapters, the digest of what they sit on

    more_is_better = True

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("loss", "language_loss") if self.recipe.tune.language else ("loss",)

    @property
    def spec(self) -> spec.Model:
        return self.start.spec

    @property
    def metric(self) -> str:
        return self.recipe.valid.metric or self.task.decides(self._labels)

    @property
    def _labels(self) -> tuple[str, ...]:
        assert self.spec.head is not None
        return self.spec.head.labels

    def digest(self) -> str:
        found = hashlib.blake2b(digest_size=16)
        for one in self.asked:  # whole: what numpy prints of a long array leaves out its middle
            for row in (*one.sequences, one.labels, () if one.at is None else one.at):
                found.update(np.asarray(row, dtype=np.float64).tobytes() + b"|")
        return found.hexdigest()

    def check(self) -> None:
        self._batches.in_epoch(0)

    def in_epoch(self) -> int:
        """Batches in which all training examples are seen once."""
        return self._batches.in_epoch(0)

    def write_down(self, folder: Path) -> None:
        self.tokeniser.save(folder / SOURCE)
        if self.base is not None:
            write_notes(folder, str(self.recipe.model["from"]), self.base)

    def from_place(self, epoch: int, index: int) -> Iterator[tuple[Place, AskedBatch]]:
        return self._batches.from_place(epoch, index)

    @cached_property
    def _batches(self) -> AskedBatches:
        how = self.recipe.train
        return AskedBatches(self.asked, how.batch_tokens, self.recipe.seed, how.workers)

    def prepare(self, part: AskedBatch, step: int) -> Any:  # noqa: ARG002
        return self.task.prepare(part.asked, has_segments(self.spec))

    def losses(self, model: AnyModel, part: Any) -> tuple[Term, ...]:
        weight = self.recipe.tune.language
        if not weight:
            return (self.task.loss(judged(model, part), part),)
        assert isinstance(model, Decoder)
        logits, hidden = model.and_hidden(part.source, part.at)
        beside = language(model, part, hidden)
        return self.task.loss(logits, part), Term(beside.total * weight, beside.targets)

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


def prepare(recipe: TaskRecipe, folder: Path) -> TaskWork:
    """Reads the examples, and loads or makes the model, under the head of its task."""
    task = task_of(recipe)
    train, valid = read_part(recipe.data, "train"), read_part(recipe.data, "valid")
    if not train or not valid:
        raise InputError(f"no {'training' if not train else 'validation'} examples; see data.train and data.valid")
    labels = tuple(task.labels(train))
    if recipe.tune.class_weights == "balanced":
        task = task_of(recipe, weights=_balanced(task, train, labels))
    torch.manual_seed(recipe.seed)  # what is fresh is drawn
    loaded = _loaded(recipe, task, labels) if "from" in recipe.model else _built(recipe, folder, task, labels, train)
    model, tokeniser = loaded.model, loaded.source
    if tokeniser is None:
        raise InputError(f"{recipe.model['from']}: has no tokeniser; name a model that has one")
    put_on(task, model)
    base = _tuned(recipe, folder, model)
    longest = input_length(model.spec)
    asked = task.ask(train, tokeniser, labels, longest)
    valid = _chosen(recipe, valid, labels)
    task.ask(valid, tokeniser, labels, longest)  # what cannot be read is said before training, not hours into it
    notes = _notes(train, valid, asked, longest, model)
    return TaskWork(recipe, task, model, tokeniser, asked, valid, notes, base)


def _loaded(recipe: TaskRecipe, task: Task[Any], labels: tuple[str, ...]) -> Loaded:
    """The model that the recipe starts from."""
    if recipe.text != Vocabulary():
        raise InputError("text: a model that is there has its tokeniser; leave out this section, or model.from")
    with _naming_the_task(task):
        return load(str(recipe.model["from"]), head=task.kind, labels=labels)


def _built(recipe: TaskRecipe, folder: Path, task: Task[Any], labels: tuple[str, ...], train: Sequence[Any]) -> Loaded:
    """A fresh model, with a tokeniser that the training examples' texts are cut by."""
    name = recipe.model["family"]
    module = families.family(name)
    takes = inspect.signature(module.spec).parameters
    if "head" not in takes:
        raise InputError(f"model.family: {name} has no head for a task; try bert, roberta, gpt2 or rnn")
    if recipe.tune.frozen:
        raise InputError("tune: of a fresh model everything has to be trained; leave out what keeps its body as it is")
    template = getattr(module, "TEMPLATE", bert.TEMPLATE)  # a family that has none, the recurrent one, reads as BERT
    tokeniser = chosen_tokeniser(recipe, folder, texts(train), template)
    given = {side: tokeniser.size for side in ("source", "target") if side in takes} | marks_of(recipe, tokeniser)
    with _naming_the_task(task):
        return Loaded(build(module.spec(shape(recipe), head=task.kind, labels=labels, **given)), tokeniser, tokeniser)


@contextmanager
def _naming_the_task(task: Task[Any]) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        if not str(error).startswith("head: "):
            raise
        raise InputError(f"task {task.name} needs a '{task.kind}' {error}") from None


def _tuned(recipe: TaskRecipe, folder: Path, model: AnyModel) -> str | None:
    """Makes ready what is trained; of a model with adapters the digest of what they sit on."""
    tune, body = recipe.tune, None
    if tune.language and (not isinstance(model, Decoder) or tune.frozen or recipe.train.spread == "fsdp"):
        said = "goes with a decoder such as gpt2 that is trained as a whole, and not in shards"
        raise InputError(f"tune.language: the next token's loss {said}; set it to 0")
    if tune.adapters is not None:
        if recipe.train.spread == "fsdp":
            raise InputError("tune.adapters: train in copies, not in shards; leave train.spread at ddp")
        body = digest(model)
        if has_last(folder):
            check_notes(folder, str(recipe.model["from"]), body)
    if tune.adapters is not None or tune.features not in (None, "last"):
        fields = None if tune.adapters is None else asdict(tune.adapters)
        adapters = None if fields is None else spec.Adapters(**(fields | {"matrices": tuple(fields["matrices"])}))
        altered(model, tune.features or "last", adapters)
    if tune.frozen:
        model.freeze()
    return body


def task_of(recipe: TaskRecipe, **more: Any) -> Task[Any]:
    """A recipe's task with its settings: those that it gives, and those that are usual for its data."""
    settings = dict(recipe.task)
    name = settings.pop("name", None)
    if name is None:
        raise InputError("key 'task.name' is missing")
    settings = _smoothed(recipe, usual(recipe.data.format, str(name)) | settings)
    try:
        return find(str(name), **settings, **more)
    except TypeError as error:
        raise InputError(f"task: {name}: {error}") from None


def _smoothed(recipe: TaskRecipe, settings: dict[str, Any]) -> dict[str, Any]:
    """A task's settings with the label smoothing that `train` asks for."""
    if not recipe.train.smoothing:
        return settings
    if recipe.task["name"] != "classify":
        raise InputError("train.smoothing: goes with the task classify; set it to 0 here")
    if "smoothing" in settings:
        raise InputError("train.smoothing and task.smoothing are one thing; leave out one of the two")
    return settings | {"smoothing": recipe.train.smoothing}


def _balanced(task: Task[Any], train: Sequence[Any], labels: Sequence[str]) -> tuple[float, ...]:
    """Inverse to how often a class is there; their mean over examples is one."""
    if task.name != "classify":
        raise InputError("tune.class_weights: goes with tasks that choose one class; leave it at none")
    counts = Counter(task.truth(example) for example in train)
    return tuple(len(train) / (len(labels) * counts[label]) for label in labels)


def _chosen(recipe: TaskRecipe, valid: Examples[Any], labels: Sequence[str]) -> Examples[Any]:
    """The validation examples that are scored; those with labels that nobody has learned are skipped where asked."""
    if recipe.data.skip_bad and labels and isinstance(valid[0], Labelled | Tagged):
        known = check_labels(labels, valid, skip_bad=True)
        valid = Examples(known, [*valid.skipped, *known.skipped])
        if not valid:
            raise InputError(f"no validation example has a label that was learned; {valid.skipped[-1]}")
    count = recipe.valid.examples
    if count is None or count >= len(valid):
        return valid
    return Examples((valid[i * len(valid) // count] for i in range(count)), valid.skipped)


def _notes(
    train: Examples[Any], valid: Examples[Any], asked: Sequence[Asked], longest: int, model: AnyModel
) -> tuple[str, ...]:
    cut = sum(one.cut for one in asked)
    found = [f"{len(train):,} training and {len(valid):,} validation examples"]
    trained, every = (sum(p.numel() for p in model.parameters() if p.requires_grad or whole) for whole in (False, True))
    if trained < every:
        found.append(f"{trained:,} of {every:,} parameters are trained")
    if cut:
        found.append(f"{cut:,} of the training texts are longer than the model's {longest} tokens and are cut")
    skipped = list(dict.fromkeys([*train.skipped, *valid.skipped]))  # what is held out comes from the same file
    if skipped:
        listed = [f"  {reason}" for reason in skipped[:_LISTED]]
        more = [f"  … and {len(skipped) - _LISTED:,} more"] if len(skipped) > _LISTED else []
        found += [f"{len(skipped):,} examples were skipped:", *listed, *more]
    return tuple(found)
