"""Extractive question answering: the stretch of a text that answers a question, or that there is none.

The question and the text go in as a pair, and each token is scored as the first and as the last of the answer; that
there is none is said at the sequence's first token, BERT's [CLS] (Devlin et al. 2019, 4.2 and 4.3). A text that is
longer than the model takes is read in windows that overlap. Where the answer is one of some candidates, as ReCoRD's
entities (Zhang et al. 2018), only their stretches compete. What is answered are characters of the text as it was given.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from qkv.data.examples import Answer, Question, refuse_outside
from qkv.decode.frames import only
from qkv.errors import InputError
from qkv.evaluate.answers import Squad, best_threshold
from qkv.evaluate.metric import Metric, Rows
from qkv.objectives import label
from qkv.objectives.label import Inputs
from qkv.objectives.term import Term
from qkv.tasks.task import Asked, pack, refuse_others, refuse_unlabelled
from qkv.text.engine import Framed
from qkv.text.tokeniser import Tokeniser

NOWHERE = (0.0, 0.0)  # first and last token, where the window holds no answer
_TOGETHER = 256  # questions framed at a time


class Stretch(NamedTuple):
    """Characters of a text, and how strongly they are said to be the answer: the sum of two logits."""

    text: str
    begin: int
    end: int
    score: float


@dataclass(frozen=True)
class Answered:
    """The best stretches, best first, and by how much the score of "no answer" exceeds that of the best."""

    best: tuple[Stretch, ...]
    no_answer: float
    threshold: float | None = None  # above which there is none; None: there is always an answer

    @property
    def text(self) -> str:
        """The answer; empty where there is none."""
        return self.above(self.threshold)

    def above(self, threshold: float | None) -> str:
        """The answer under another threshold."""
        none = threshold is not None and self.no_answer > threshold
        return "" if none or not self.best else self.best[0].text


class Place(NamedTuple):
    """Where the tokens of a window that may answer stand: the first of them in the window, and their characters."""

    first: int
    begins: Sequence[int]
    ends: Sequence[int]
    low: int  # the characters that the window covers, those without a token at the text's own ends included
    high: int


@dataclass(frozen=True, kw_only=True)
class Extract:
    """See `qkv.tasks.task.Task`. A prediction is an `Answered`."""

    stride: int = 128  # tokens from one window to the next; at most half a window
    longest: int = 30  # tokens of an answer
    best: int = 20  # how many stretches a prediction has
    # how much higher "no answer" has to score than the best stretch; None: 0 where questions without answer are learned
    # from or scored, else there always is one
    threshold: float | None = None
    metric: str = "f1"  # or exact; both out of 100

    name = "answer"
    kind = "span"
    head_fields: ClassVar[dict[str, Any]] = {}
    example = Question

    def __post_init__(self) -> None:
        for key in ("stride", "longest", "best"):
            if getattr(self, key) < 1:
                raise InputError(f"task.{key}: at least 1, not {getattr(self, key)}")

    def decides(self, labels: Sequence[str]) -> str:  # noqa: ARG002
        return self.metric

    def labels(self, examples: Sequence[Question]) -> tuple[str, ...]:
        refuse_unlabelled(self, examples, Question)
        return ()

    def found_out(self, examples: Sequence[Question]) -> dict[str, Any]:
        """Settings that nobody gave and that the training examples tell: some have no answer, so that may be said."""
        none = any(_is_known(one) and not one.answers for one in examples)
        return {"threshold": 0.0} if none and self.threshold is None else {}

    def ask(
        self,
        examples: Sequence[Question],
        tokeniser: Tokeniser,
        labels: Sequence[str],  # noqa: ARG002
        longest: int,
    ) -> list[Asked]:
        refuse_others(self.name, examples, Question)
        found: list[Asked] = []
        for begin in range(0, len(examples), _TOGETHER):
            some = examples[begin : begin + _TOGETHER]
            frames = tokeniser.frame_batch([(one.question, one.context) for one in some])
            for number, (frame, one) in enumerate(zip(frames, some, strict=True), begin):
                found += self._windows(number, one, frame, longest)
        return found

    def _windows(self, number: int, example: Question, frame: Framed, longest: int) -> Iterator[Asked]:
        _check(example, frame)
        whole = len(frame.ids)
        frame = _with_room(frame, longest)
        first, size = frame.parts.index(1), frame.parts.count(1)
        room = longest - (len(frame.ids) - size)
        begins = [0]
        while begins[-1] + room < size:
            begins.append(begins[-1] + min(self.stride, max(1, room // 2)))
        before, behind = range(first), range(first + size, len(frame.ids))
        for begin in begins:
            end = min(begin + room, size)
            window = only(frame, [*before, *range(first + begin, first + end), *behind])
            offsets = window.offsets[first : first + end - begin]
            place = Place(
                first,
                array("i", [start for start, _ in offsets]),
                array("i", [stop for _, stop in offsets]),
                offsets[0][0] if begin else 0,
                offsets[-1][1] if end < size else len(example.context),
            )
            right = () if not _is_known(example) else _right(place, example.answers)
            yield Asked.of(number, [window], right, about=place, cut=len(frame.ids) < whole)

    def prepare(self, asked: Sequence[Asked], segments: bool) -> Inputs:
        source, kinds, _ = pack(asked, segments)
        right = [one.labels for one in asked if one.labels]
        return Inputs(source, kinds, None, torch.tensor(right, dtype=torch.long))  # [B, 2]

    def loss(self, logits: Tensor, batch: Inputs) -> Term:
        return label.spans(logits, batch)

    def read(self, asked: Sequence[tuple[Asked, Tensor]], example: Question, labels: Sequence[str]) -> Answered:  # noqa: ARG002
        scores: dict[tuple[int, int], float] = {}
        for one, logits in asked:
            for span, score in self._stretches(one.about, logits, example):
                scores[span] = max(score, scores.get(span, score))
        best = heapq.nlargest(self.best, scores.items(), key=lambda item: item[1])
        nothing = min(float(logits[0].sum()) for _, logits in asked)  # each window has to say that it has none
        stretches = tuple(Stretch(example.context[begin:end], begin, end, score) for (begin, end), score in best)
        margin = nothing - stretches[0].score if stretches else float("inf")
        return Answered(stretches, margin, self.threshold)

    def _stretches(self, place: Place, logits: Tensor, example: Question) -> Iterator[tuple[tuple[int, int], float]]:
        """Some characters of the context with their score: the candidates', or the best of all."""
        count = len(place.begins)
        inside = logits[place.first : place.first + count]  # [n, 2]
        if example.candidates:
            for candidate in example.candidates:
                span = _tokens(place, candidate.start, candidate.start + len(candidate.text))
                if span is not None:
                    score = float(inside[span[0], 0] + inside[span[1], 1])
                    yield (candidate.start, candidate.start + len(candidate.text)), score
            return
        joint = inside[:, None, 0] + inside[None, :, 1]  # [n, n]
        allowed = torch.ones_like(joint, dtype=torch.bool).triu().tril(self.longest - 1)
        scores, flat = joint.masked_fill(~allowed, float("-inf")).flatten().topk(min(4 * self.best, count * count))
        for score, number in zip(scores.tolist(), flat.tolist(), strict=True):
            span = _stripped(example.context, place.begins[number // count], place.ends[number % count])
            if score > float("-inf") and span[0] < span[1]:
                yield span, score

    def truth(self, example: Question) -> tuple[str, ...]:
        if not _is_known(example):
            raise InputError(f"{example.where}: nobody has said what the answer is; give it, or none")
        return tuple(answer.text for answer in example.answers)

    def metrics(
        self,
        labels: Sequence[str],  # noqa: ARG002
        predictions: Sequence[Answered],  # noqa: ARG002
        truths: Sequence[Sequence[str]],
    ) -> list[Metric[Any, Any]]:
        if all(truths) and self.threshold is None:
            return [_Said("1.1")]
        return [_Said("2.0", 0.0 if self.threshold is None else self.threshold)]


def best_margin(predictions: Sequence[Answered], examples: Sequence[Question]) -> tuple[float, float]:
    """The best F1 that any threshold gives on these questions, out of 100, and that threshold, as SQuAD 2.0 has it."""
    metric = Squad("2.0")
    truths = [tuple(answer.text for answer in example.answers) for example in examples]
    rows = metric.statistics([one.above(None) for one in predictions], truths)
    scores = {str(i): figures["f1"] / 100 for i, figures in enumerate(metric.each(rows))}
    answerable = {str(i): bool(truth) for i, truth in enumerate(truths)}
    return best_threshold(scores, answerable, {str(i): one.no_answer for i, one in enumerate(predictions)})


@dataclass(frozen=True)
class _Said(Squad):
    """SQuAD's figures of what is answered under a threshold."""

    threshold: float | None = None

    def statistics(self, hypotheses: Sequence[Any], references: Sequence[Sequence[str]]) -> Rows:
        return super().statistics([one.above(self.threshold) for one in hypotheses], references)


def _check(example: Question, frame: Framed) -> None:
    for answer in (*example.answers, *example.candidates):
        refuse_outside(answer.start, answer.start + len(answer.text), example.context, example.where, "answer")
    for part, name in enumerate(("question", "context")):
        if part not in frame.parts:
            raise InputError(f"{example.where}: the {name} is empty; fill it in, or remove it")


def _is_known(example: Question) -> bool:
    return bool(example.answers) or example.answerable is False


def _with_room(frame: Framed, longest: int) -> Framed:
    """Without the end of a question that would leave the context less than half of the model."""
    asked = frame.parts.count(0)
    over = asked - max(1, longest // 2 - frame.parts.count(None))
    if over <= 0 or len(frame.ids) <= longest:
        return frame
    end = frame.parts.index(0) + asked
    return only(frame, [i for i in range(len(frame.ids)) if not end - over <= i < end])


def _right(place: Place, answers: Sequence[Answer]) -> tuple[float, float]:
    """The first and last token, in the window, of an answer that it holds whole."""
    for answer in answers:
        found = _tokens(place, answer.start, answer.start + len(answer.text))
        if found is not None:
            return float(place.first + found[0]), float(place.first + found[1])
    return NOWHERE


def _tokens(place: Place, begin: int, end: int) -> tuple[int, int] | None:
    """The first and last of the tokens that hold these characters, if the window holds them all."""
    if begin < place.low or end > place.high:
        return None
    edges = enumerate(zip(place.begins, place.ends, strict=True))
    held = [i for i, (first, last) in edges if first < end and begin < last]
    return (held[0], held[-1]) if held else None


def _stripped(text: str, begin: int, end: int) -> tuple[int, int]:
    """Without the white space at both ends: byte-level tokens hold the space before their word."""
    while begin < end and text[begin].isspace():
        begin += 1
    while end > begin and text[end - 1].isspace():
        end -= 1
    return begin, end


def make(**settings: Any) -> Extract:
    return Extract(**settings)
