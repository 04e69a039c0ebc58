"""Learning a task: its examples, a model that is there under the task's head, the task's own metrics."""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qkv import families, spec
from qkv.data.batches import Endless, Ints, Place, even_edges
from qkv.data.chance import Chance
from qkv.data.examples import Examples
from qkv.data.images import PREPROCESSOR, Images
from qkv.data.labels import Classified, check_labels
from qkv.data.sifting import sifted, skipped_lines
from qkv.decode.frames import input_length
from qkv.errors import InputError, nearest
from qkv.families import bert
from qkv.nn import Decoder, build
from qkv.nn.model import altered
from qkv.objectives.label import judged, language
from qkv.objectives.term import Term
from qkv.tasks.benchmarks import usual
from qkv.tasks.picture import Picture, Seen
from qkv.tasks.task import Asked, Task, check_senses, find, has_segments, predict, put_on, score
from qkv.text.tokeniser import Tokeniser
from qkv.train.beginning import begun
from qkv.train.checkpoint import has_last
from qkv.train.reading import chosen_tokeniser, marks_of
from qkv.train.recipe import shape
from qkv.train.sections import TaskRecipe, Vocabulary
from qkv.train.task_data import read_part, texts
from qkv.weights.adapters import check_notes, digest, write_notes
from qkv.weights.folder import SOURCE, AnyModel, Loaded

__all__ = ["TaskWork", "prepare", "read_part"]

_ONE_CLASS = ("classify", "picture")  # tasks that choose one class


@dataclass(frozen=True, eq=False)
class AskedBatch:
    """Some examples of a batch."""

    asked: list[Asked]
    epoch: int

    @property
    def tokens(self) -> int:
        return sum(one.length for one in self.asked)

    def split(self, parts: int) -> list[AskedBatch]:
        """Cut into at most `parts` consecutive batches of about equal token count."""
        ends = np.cumsum([one.length for one in self.asked]).tolist()
        edges = even_edges(ends, min(parts, len(self.asked)))
        return [AskedBatch(self.asked[begin:end], self.epoch) for begin, end in pairwise(edges)]


class AskedBatches(Endless[AskedBatch]):
    """The endless run of batches of a task's examples, as chance has them.

    Nothing is padded, so that examples of one length need not share a batch; those of a kind would too often.
    """

    def __init__(self, asked: Sequence[Asked], budget: int, seed: int, workers: int = 0) -> None:
        super().__init__(budget, seed, workers, pool=1)
        self._asked = asked
        self._sizes = np.array([one.length for one in asked], dtype=np.int64)

    def _lengths(self, epoch: int) -> tuple[Ints, Ints]:  # noqa: ARG002  # the same in every epoch
        return self._sizes, np.zeros_like(self._sizes)

    def _take(self, epoch: int, indices: Ints) -> AskedBatch:
        return AskedBatch([self._asked[index] for index in indices], epoch)


@dataclass(frozen=True, eq=False)
class TaskWork:
    """See `qkv.train.work.Work`."""

    recipe: TaskRecipe
    task: Task[Any]
    start: AnyModel  # as it was loaded, or fresh
    reader: Tokeniser | Images
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
            if isinstance(one.about, Seen):
                found.update(one.about.content())
        return found.hexdigest()

    def check(self) -> None:
        self._batches.in_epoch(0)

    def in_epoch(self) -> int:
        """Batches in which all training examples are seen once."""
        return self._batches.in_epoch(0)

    def write_down(self, folder: Path) -> None:
        self.reader.save(folder / (PREPROCESSOR if isinstance(self.reader, Images) else SOURCE))
        if self.base is not None:
            write_notes(folder, str(self.recipe.model["from"]), self.base)

    def from_place(self, epoch: int, index: int) -> Iterator[tuple[Place, AskedBatch]]:
        return self._batches.from_place(epoch, index)

    @cached_property
    def _batches(self) -> AskedBatches:
        how = self.recipe.train
        return AskedBatches(self.asked, how.batch_tokens, self.recipe.seed, how.workers)

    def prepare(self, part: AskedBatch, step: int) -> Any:  # noqa: ARG002
        if isinstance(self.task, Picture):
            return self.task.varied(part.asked, Chance(self.recipe.seed, part.epoch))
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
        if isinstance(self.reader, Images):
            loaded = Loaded(model, images=self.reader)
        else:
            loaded = Loaded(model, self.reader, self.reader)
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
    if recipe.data.skip_bad:
        train = sifted(train, task.labels)
    if train and not valid and not valid.skipped and recipe.data.valid is None:
        kept = f" by their {recipe.data.together}" if recipe.data.together else ""
        said = f"none of the {len(train):,} was held out{kept}; raise data.hold_out.valid, or give data.valid"
        raise InputError(f"no validation examples: {said}")
    train, valid = _some(train, "training"), _some(valid, "validation")
    labels = tuple(task.labels(train))
    if hasattr(task, "found_out"):
        recipe = replace(recipe, task=recipe.task | task.found_out(train))
        task = task_of(recipe)
    if recipe.tune.class_weights == "balanced":
        task = task_of(recipe, weights=_balanced(task, train, labels))
    torch.manual_seed(recipe.seed)  # what is fresh is drawn
    loaded = _loaded(recipe, task, labels) if "from" in recipe.model else _built(recipe, folder, task, labels, train)
    model, reader = loaded.model, _reader(recipe, task, loaded)
    put_on(task, model)
    base = _tuned(recipe, folder, model)
    longest = input_length(model.spec)
    if recipe.data.skip_bad:
        train = _learnable(task, train, reader, labels, longest)
    asked = task.ask(train, reader, labels, longest)
    valid = _chosen(recipe, valid, labels, lambda some: _refuse_unscorable(task, some, reader, labels, longest))
    notes = _notes(train, valid, asked, longest, model)
    return TaskWork(recipe, task, model, reader, asked, valid, notes, base)


def _reader(recipe: TaskRecipe, task: Task[Any], loaded: Loaded) -> Tokeniser | Images:
    """What makes of examples what the model takes."""
    check_senses(task, loaded.model.spec)
    if isinstance(task, Picture):
        assert isinstance(loaded.model.spec.source, spec.Patches)  # it was looked at
        return task.images(loaded.model.spec.source, loaded.images)
    if loaded.source is None:
        raise InputError(f"{recipe.model['from']}: has no tokeniser; name a model that has one")
    return loaded.source


def _loaded(recipe: TaskRecipe, task: Task[Any], labels: tuple[str, ...]) -> Loaded:
    """The model that the recipe starts from."""
    with _naming_the_task(task):
        return begun(recipe, head=task.kind, labels=labels)


def _built(recipe: TaskRecipe, folder: Path, task: Task[Any], labels: tuple[str, ...], train: Sequence[Any]) -> Loaded:
    """A fresh model, and where it reads text a tokeniser that the training examples' texts are cut by."""
    name = recipe.model["family"]
    module = families.family(name)
    takes = inspect.signature(module.spec).parameters
    if "head" not in takes:
        raise InputError(f"model.family: {name} has no head for a task; try bert, roberta, gpt2, rnn or vit")
    if recipe.tune.frozen:
        raise InputError("tune: of a fresh model everything has to be trained; leave out what keeps its body as it is")
    if isinstance(task, Picture):
        if not hasattr(module.Shape, "patch"):
            raise InputError(f"model.family: {name} reads text, and the task picture needs one that looks; take vit")
        if recipe.text != Vocabulary():
            raise InputError("text: a model that looks at pictures has no tokeniser; leave out this section")
        with _naming_the_task(task):
            return Loaded(build(module.spec(shape(recipe), head=task.kind, labels=labels)))
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
    if recipe.task["name"] not in _ONE_CLASS:
        raise InputError(f"train.smoothing: goes with the task {' or '.join(_ONE_CLASS)}; set it to 0 here")
    if "smoothing" in settings:
        raise InputError("train.smoothing and task.smoothing are one thing; leave out one of the two")
    return settings | {"smoothing": recipe.train.smoothing}


def _balanced(task: Task[Any], train: Sequence[Any], labels: Sequence[str]) -> tuple[float, ...]:
    """Inverse to how often a class is there; their mean over examples is one."""
    if task.name not in _ONE_CLASS:
        raise InputError("tune.class_weights: goes with tasks that choose one class; leave it at none")
    counts = Counter(task.truth(example) for example in train)
    return tuple(len(train) / (len(labels) * counts[label]) for label in labels)


def _refuse_unscorable(
    task: Task[Any], examples: Sequence[Any], reader: Tokeniser | Images, labels: Sequence[str], longest: int
) -> None:
    """What cannot be read or has no truth is said before training, not hours into it."""
    task.ask(examples, reader, labels, longest)
    for one in examples:
        task.truth(one)


def _chosen(
    recipe: TaskRecipe, valid: Examples[Any], labels: Sequence[str], check: Callable[[Sequence[Any]], None]
) -> Examples[Any]:
    """The validation examples that are scored; those that cannot be are skipped where asked."""
    if recipe.data.skip_bad:
        valid = _some(sifted(valid, check), "validation")
    count = recipe.valid.examples
    if count is not None and count < len(valid):
        valid = Examples((valid[i * len(valid) // count] for i in range(count)), valid.skipped)
    if not recipe.data.skip_bad:
        if recipe.data.valid is None and recipe.data.hold_out and labels and isinstance(valid[0], Classified):
            _refuse_lone(labels, valid)
        check(valid)
    return valid


def _refuse_lone(labels: Sequence[str], held: Sequence[Any]) -> None:
    """A class whose few examples are all held out is in the person's file: that training never saw it is half of it."""
    lone = check_labels(labels, held, skip_bad=True).skipped
    if lone:
        raise InputError(f"{lone[0]}; all that have it were held out: add some, or name other validation examples")


def _learnable(
    task: Task[Any], train: Examples[Any], reader: Tokeniser | Images, labels: Sequence[str], longest: int
) -> Examples[Any]:
    """Those that a model can be asked; a class that would be left without any is named."""
    kept = _some(sifted(train, lambda some: task.ask(some, reader, labels, longest)), "training")
    empty = sorted(set(labels).difference(task.labels(kept)))
    if empty:
        raise InputError(f"no example of the label '{empty[0]}' is left, the last bad one: {kept.skipped[-1]}")
    return kept


def _some(examples: Examples[Any], part: str) -> Examples[Any]:
    """Examples, of which there has to be one."""
    if not examples:
        bad = examples.skipped
        why = f", {len(bad):,} were bad, the first: {bad[0]}" if bad else "; see data.train and data.valid"
        raise InputError(f"no {part} examples{why}")
    return examples


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
    return (*found, *skipped_lines(skipped))
