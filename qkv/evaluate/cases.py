"""An example and what was said of it, as a person reads them: which part is right, which wrong, which was missed."""

from __future__ import annotations

import base64
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from qkv.data.examples import Choice, Labelled, Pictured, Question, Tagged
from qkv.data.images import as_png
from qkv.evaluate.answers import exact, overlap

Mark = Literal["", "right", "wrong", "missed"]
_LONGEST = 1200  # characters of a text that are shown
_AROUND = 200  # characters of a context on both sides of what is marked in it
_SIDE = 112  # pixels of a picture that are shown at most
_NONE = "(none)"


@dataclass(frozen=True)
class Judged:
    """An example, what a model says of it, and what is right."""

    example: Any
    prediction: Any
    truth: Any
    confidence: float | None = None
    span: tuple[int, int] | None = None  # where an answer stands in its context


@dataclass(frozen=True)
class Piece:
    """A stretch of text: as it is, rightly found, wrongly said, or right and not found."""

    text: str
    mark: Mark = ""
    note: str = ""


@dataclass(frozen=True)
class Case:
    """A wrong prediction."""

    where: str
    predicted: str
    right: str
    confidence: float | None
    lines: tuple[tuple[Piece, ...], ...]
    picture: str = ""  # as a page has it inside, data:image/png;…


def error(judged: Judged) -> float:
    """How wrong a prediction is: 0 where it is right; 1 where nothing of it is; of numbers how far away."""
    example, said, right = judged.example, judged.prediction, judged.truth
    if isinstance(example, Question):
        return _unanswered(_text(said), [answer.text for answer in example.answers] or [""])
    if isinstance(right, float) and isinstance(said, int | float):
        return float(abs(said - right))
    if isinstance(example, Tagged):
        wrong = sum(one != other for one, other in zip(said, right, strict=True))
        return float(wrong / max(len(right), 1))
    if isinstance(said, Set) or isinstance(right, Set):
        return float(set(said) != set(right))
    return float(said != right)


def _unanswered(said: str, answers: Sequence[str]) -> float:
    return 0.0 if any(exact(said, one) for one in answers) else 1 - max(overlap(said, one) for one in answers)


def _text(answer: Any) -> str:
    """Of an answer that has more to it, what is answered."""
    return str(getattr(answer, "text", answer) or "")


def case(judged: Judged) -> Case:
    """A prediction as a page shows it."""
    example = judged.example
    show = _SHOWN.get(type(example), _plain)
    return Case(
        getattr(example, "where", ""),
        _named(_text(judged.prediction) if isinstance(example, Question) else judged.prediction, example),
        _named(_right(judged), example),
        judged.confidence,
        show(judged),
        _pictured(example) if isinstance(example, Pictured) else "",
    )


def _pictured(example: Pictured) -> str:
    return f"data:image/png;base64,{base64.b64encode(as_png(example.picture, _SIDE)).decode()}"


def _right(judged: Judged) -> Any:
    """Of several answers the first."""
    if isinstance(judged.example, Question):
        return next((answer.text for answer in judged.example.answers), "")
    return judged.truth


def _named(what: Any, example: Any) -> str:
    if isinstance(example, Choice) and isinstance(what, int):
        return f"{what + 1}: {_cut(example.options[what], 80)}" if 0 <= what < len(example.options) else str(what)
    if isinstance(example, Tagged):
        return ""  # said word by word
    if isinstance(what, float):
        return f"{what:.4g}"
    if isinstance(what, Set | tuple | list):
        return ", ".join(sorted(map(str, what))) or _NONE
    return _cut(str(what), 120) if what is not None and what != "" else _NONE


def _plain(judged: Judged) -> tuple[tuple[Piece, ...], ...]:
    return ((Piece(_cut(str(judged.example))),),)


def _labelled(judged: Judged) -> tuple[tuple[Piece, ...], ...]:
    texts = [judged.example.text, judged.example.second]
    return tuple((Piece(_cut(text)),) for text in texts if text is not None)


def _tagged(judged: Judged) -> tuple[tuple[Piece, ...], ...]:
    """The sentence; a word is marked where its tag is wrong, or is right and says something."""
    example, pieces, end = judged.example, [], 0
    words = zip(example.words, example.starts, judged.prediction, judged.truth, strict=True)
    for word, start, said, right in words:
        pieces.append(Piece(example.text[end:start]))
        end = start + len(word)
        if said == right:
            pieces.append(Piece(word) if right == "O" else Piece(word, "right", right))
        else:
            mark: Mark = "missed" if said == "O" else "wrong"
            pieces.append(Piece(word, mark, f"{said}, not {right}"))
    pieces.append(Piece(example.text[end:]))
    return (tuple(piece for piece in pieces if piece.text),)


def _asked(judged: Judged) -> tuple[tuple[Piece, ...], ...]:
    """The question, and the context with the answer that was given and the first right one."""
    example = judged.example
    said = judged.span or _found(example.context, _text(judged.prediction))
    right = next(((a.start, a.start + len(a.text)) for a in example.answers), None)
    return ((Piece(_cut(example.question)),), _spans(example.context, said, right))


def _found(context: str, answer: str) -> tuple[int, int] | None:
    place = context.find(answer) if answer else -1
    return (place, place + len(answer)) if place >= 0 else None


def _spans(text: str, said: tuple[int, int] | None, right: tuple[int, int] | None) -> tuple[Piece, ...]:
    """A text with what was said and what is right in it; they may overlap. Far from both it is left out."""
    spans = [span for span in (said, right) if span is not None]
    edges = sorted({0, len(text), *(edge for span in spans for edge in span)})
    pieces = []
    for begin, end in pairwise(edges):
        inside = [span is not None and span[0] <= begin and end <= span[1] for span in (said, right)]
        mark: Mark = "right" if all(inside) else "wrong" if inside[0] else "missed" if inside[1] else ""
        note = {"wrong": "said", "missed": "right", "right": "said and right", "": ""}[mark]
        pieces.append(
            Piece(text[begin:end] if mark else _near(text[begin:end], begin > 0, end < len(text)), mark, note)
        )
    return tuple(pieces)


def _near(text: str, after: bool, before: bool) -> str:
    """What of an unmarked stretch is near to a mark: its beginning, its end, or both."""
    if not after and not before:
        return _cut(text)
    if len(text) <= _AROUND * (after + before):
        return text
    return (text[:_AROUND] if after else "") + " … " + (text[-_AROUND:] if before else "")


def _chosen(judged: Judged) -> tuple[tuple[Piece, ...], ...]:
    example = judged.example
    lines: list[tuple[Piece, ...]] = [(Piece(_cut(text)),) for text in (example.context, example.second) if text]
    for number, option in enumerate(example.options):
        said, right = (which in (number, option) for which in (judged.prediction, judged.truth))
        mark: Mark = "right" if said and right else "wrong" if said else "missed" if right else ""
        note = {"right": "said and right", "wrong": "said", "missed": "right", "": ""}[mark]
        lines.append((Piece(f"{number + 1}. "), Piece(_cut(option), mark, note)))
    return tuple(lines)


def _nothing(judged: Judged) -> tuple[tuple[Piece, ...], ...]:  # noqa: ARG001  # a picture has no text
    return ()


_SHOWN = {Labelled: _labelled, Tagged: _tagged, Question: _asked, Choice: _chosen, Pictured: _nothing}


def _cut(text: str, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else f"{text[:longest]}…"
