"""What a model says of an example, for people and programs: the prediction with probabilities and places in the text.

A task's `read` gives what its metrics take. Here stands what else its logits say; they are those that `read` has seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qkv.data.examples import Choice, Labelled, Pictured, Question, Tagged
from qkv.data.tags import cut, scheme_of, tagged
from qkv.errors import InputError
from qkv.evaluate.entities import entities
from qkv.tasks.task import Asked, Task, logits_of
from qkv.weights import Loaded

if TYPE_CHECKING:
    from qkv.tasks.answer import Answered

Found = Sequence[tuple[Asked, Tensor]]


@dataclass(frozen=True)
class Said:
    """A prediction as the metrics take it, and all else."""

    prediction: Any
    ranked: tuple[tuple[str, float], ...]  # what else it might be: texts and probabilities, likeliest first
    told: dict[str, Any] = field(default_factory=dict)  # as JSON
    confidence: float | None = None  # the probability of the prediction; a number has none
    words: tuple[float, ...] = ()  # the probability of each word's tag
    span: tuple[int, int] | None = None  # where an answer stands in its context
    cut: bool = False  # the model saw less than there is

    @property
    def line(self) -> str:
        """The prediction as one line of text."""
        if isinstance(self.prediction, frozenset):
            return ", ".join(self.told["labels"])
        if "answer" in self.told:
            return str(self.told["answer"])
        return str(self.told["text"]) if "choice" in self.told else self.ranked[0][0]

    def surest_mistake(self, truth: Any) -> float | None:
        """The confidence in what is wrong: of tags in the surest wrong one."""
        if not self.words:
            return self.confidence
        wrong = zip(self.words, self.prediction, truth, strict=True)
        return max((chance for chance, said, right in wrong if said != right), default=self.confidence)


def say(task: Task[Any], loaded: Loaded, examples: Sequence[Any], *, best: int = 1, budget: int = 16384) -> list[Said]:
    """What a model says of each example, in their order; `best` is how much of what else it might be is told."""
    found = logits_of(task, loaded, examples, budget)
    head = loaded.model.spec.head
    assert head is not None  # or there would be no logits
    out = []
    for parts, example in zip(found, examples, strict=True):
        prediction = task.read(parts, example, head.labels)
        tell = _SAID.get(task.name, _plain)
        out.append(tell(task, parts, example, head.labels, prediction, best))
    return out


def settled(task: Task[Any], said: Sequence[Said], truths: Sequence[Any]) -> list[Said]:
    """As the task's metrics take it: where some questions have no answer, a model may say that there is none."""
    if task.name != "answer" or all(truths) or getattr(task, "threshold", None) is not None:
        return list(said)
    return [replace(_answered(replace(one.prediction, threshold=0.0), 1), cut=one.cut) for one in said]


def example_of(task: Task[Any], given: str, where: str) -> Any:
    """A line of text as the task takes it: texts that belong together have a tab between them, a picture is a file."""
    pairs = getattr(task, "pairs", None)
    texts = [given] if task.name in ("tag", "picture") or pairs is False else given.split("\t")
    if not all(text.strip() for text in texts):
        raise InputError(f"{where}: is empty; give some text")
    if task.name == "picture":
        return Pictured(Path(given), where)
    if task.name in ("classify", "rate", "label"):
        if pairs and len(texts) == 1:
            raise InputError(f"{where}: this model takes two texts, with a tab between them")
        if len(texts) > 2:
            raise InputError(f"{where}: this model takes one text or two, not {len(texts)}")
        return Labelled(texts[0], where, texts[1] if len(texts) == 2 else None)
    if task.name == "tag":
        return Tagged(given, *cut(given), None, where)
    wanted = {"answer": "a question and a text", "choose": "a text and its choices"}[task.name]
    if len(texts) < 2 or (task.name == "answer" and len(texts) > 2):
        raise InputError(f"{where}: this model takes {wanted}, with a tab between them")
    if task.name == "answer":
        return Question("", texts[0], texts[1], (), where, answerable=None)
    return Choice(texts[0], tuple(texts[1:]), None, where)


def shown(example: Any) -> str:
    """An example as a line of text; the inverse of `example_of`."""
    if isinstance(example, Question):
        return f"{example.question}\t{example.context}"
    if isinstance(example, Choice):
        return "\t".join([example.context, *([example.second] if example.second else []), *example.options])
    if isinstance(example, Pictured):
        return str(example.picture) if isinstance(example.picture, Path) else example.where
    second = getattr(example, "second", None)
    return str(example.text) if second is None else f"{example.text}\t{second}"


# ---- a task each ----------------------------------------------------------------------------------------------------


def _plain(
    task: Task[Any],  # noqa: ARG001
    parts: Found,
    example: Any,  # noqa: ARG001
    labels: Sequence[str],  # noqa: ARG001
    prediction: Any,
    best: int,  # noqa: ARG001
) -> Said:
    """Of a task that is not known here: what its metrics take."""
    return Said(prediction, ((str(prediction), math.nan),), {"prediction": str(prediction)}, cut=_cut(parts))


def _class(
    task: Task[Any],  # noqa: ARG001
    parts: Found,
    example: Any,  # noqa: ARG001
    labels: Sequence[str],
    prediction: str,
    best: int,
) -> Said:
    chances = torch.softmax(parts[0][1][0], -1).tolist()
    ranked = _ranked(labels, chances)
    own = chances[labels.index(prediction)]
    told = {"label": prediction, "probability": own} | ({"probabilities": dict(ranked[:best])} if best > 1 else {})
    return Said(prediction, ranked[:best], told, own, cut=_cut(parts))


def _number(
    task: Task[Any],  # noqa: ARG001
    parts: Found,
    example: Any,  # noqa: ARG001
    labels: Sequence[str],  # noqa: ARG001
    prediction: float,
    best: int,  # noqa: ARG001
) -> Said:
    return Said(prediction, ((f"{prediction:.4f}", prediction),), {"value": prediction}, cut=_cut(parts))


def _several(
    task: Task[Any],  # noqa: ARG001
    parts: Found,
    example: Any,  # noqa: ARG001
    labels: Sequence[str],
    prediction: frozenset[str],
    best: int,
) -> Said:
    chances = torch.sigmoid(parts[0][1][0]).tolist()
    ranked = _ranked(labels, chances)
    held = {name: chance for name, chance in ranked if name in prediction}
    told: dict[str, Any] = {"labels": held} | ({"probabilities": dict(ranked[:best])} if best > 1 else {})
    # that each is as it was said, were they independent
    whole = math.prod(chance if name in prediction else 1 - chance for name, chance in ranked)
    lines = ranked[:best] if best > 1 else tuple(held.items())
    return Said(prediction, lines, told, whole, cut=_cut(parts))


def _tags(
    task: Task[Any], parts: Found, example: Any, labels: Sequence[str], prediction: Sequence[str], best: int
) -> Said:
    one = tagged(example) if isinstance(example, Labelled) else example
    chances = _word_chances(parts, len(one.words))
    spans = [(start, start + len(word)) for start, word in zip(one.starts, one.words, strict=True)]
    words = [
        {"text": word, "tag": tag, "begin": begin, "end": end, "probability": chance}
        for word, tag, (begin, end), chance in zip(one.words, prediction, spans, chances, strict=True)
    ]
    told: dict[str, Any] = {}
    are_chunks = scheme_of([labels]) is not None
    if are_chunks:
        told["entities"] = [
            {
                "text": one.text[spans[entity.start][0] : spans[entity.end - 1][1]],
                "type": entity.type,
                "begin": spans[entity.start][0],
                "end": spans[entity.end - 1][1],
                "probability": math.prod(chances[entity.start : entity.end]),
            }
            for entity in entities(prediction, getattr(task, "scheme", "lenient"))
        ]
    if not are_chunks or best > 1:
        told["words"] = words
    whole = " ".join(f"{word}/{tag}" for word, tag in zip(one.words, prediction, strict=True))
    chance = math.prod(chances)
    return Said(tuple(prediction), ((whole, chance),), told, chance, tuple(chances), cut=_cut(parts))


def _word_chances(parts: Found, count: int) -> list[float]:
    """The probability of each word's tag; a word that no row of logits is of has none of its own."""
    found: dict[int, float] = {}
    for asked, logits in parts:
        chances = torch.softmax(logits, -1).amax(-1).tolist() if len(logits) else []
        for word, chance in zip(asked.about.words, chances, strict=True):
            found.setdefault(word, chance)
    return [found.get(word, 1.0) for word in range(count)]


def _choice(
    task: Task[Any],  # noqa: ARG001
    parts: Found,
    example: Choice,
    labels: Sequence[str],  # noqa: ARG001
    prediction: int,
    best: int,
) -> Said:
    chances = torch.softmax(parts[0][1][:, 0], 0).tolist()
    told: dict[str, Any] = {"choice": prediction, "text": example.options[prediction]}
    told["probability"] = chances[prediction]
    if best > 1:
        told["probabilities"] = chances
    return Said(prediction, _ranked(example.options, chances)[:best], told, chances[prediction], cut=_cut(parts))


def _answer(
    task: Task[Any],  # noqa: ARG001
    parts: Found,
    example: Question,  # noqa: ARG001
    labels: Sequence[str],  # noqa: ARG001
    prediction: Answered,
    best: int,
) -> Said:
    return replace(_answered(prediction, best), cut=_cut(parts))


def _answered(prediction: Answered, best: int) -> Said:
    """Probabilities are those among the stretches that were kept, and "no answer" where that may be said."""
    raw = [stretch.score for stretch in prediction.best]
    may_be_none = prediction.threshold is not None or not raw
    nothing = prediction.no_answer + raw[0] if raw else 0.0
    chances = torch.softmax(torch.tensor([*raw, *([nothing] if may_be_none else [])]), 0).tolist()
    stretches: list[dict[str, Any]] = [
        {"answer": one.text, "begin": one.begin, "end": one.end, "probability": chance}
        for one, chance in zip(prediction.best, chances, strict=False)
    ]
    found = bool(prediction.text)
    told = dict(stretches[0]) if found else {"answer": "", "begin": None, "end": None, "probability": chances[-1]}
    told["no_answer"] = prediction.no_answer if raw else None
    if best > 1:
        told["answers"] = stretches[:best]
    ranked = [(str(one["answer"]), float(one["probability"])) for one in stretches]
    ranked = ranked if found else [("", told["probability"]), *ranked]
    span = (prediction.best[0].begin, prediction.best[0].end) if found else None
    return Said(prediction, tuple(ranked[:best]), told, told["probability"], span=span)


def _ranked(names: Sequence[str], chances: Sequence[float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(zip(names, chances, strict=True), key=lambda one: -one[1]))


def _cut(parts: Found) -> bool:
    return any(asked.cut for asked, _ in parts)


_SAID: dict[str, Callable[[Task[Any], Found, Any, Sequence[str], Any, int], Said]] = {
    "classify": _class,
    "rate": _number,
    "label": _several,
    "tag": _tags,
    "choose": _choice,
    "answer": _answer,
    "picture": _class,
}
