"""An example and what was said of it, as a person reads them: which part is right, which wrong, which was missed."""

from __future__ import annotations

import base64
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from qkv.data.examples import ImageExample, MultipleChoiceExample, QAExample, TaggedExample, TextExample
from qkv.data.image_processor import thumbnail_png
from qkv.metrics.squad import answer_f1, exact_match

HighlightKind = Literal["", "correct", "wrong", "missed"]
_MAX_CHARS = 1200  # characters of a text that are shown
_CONTEXT_CHARS = 200  # characters of a context on both sides of what is marked in it
_THUMBNAIL_SIZE = 112  # pixels of a picture that are shown at most
_NONE_TEXT = "(none)"


@dataclass(frozen=True)
class ScoredExample:
    """An example, what a model says of it, and what is right."""

    example: Any
    prediction: Any
    gold: Any
    confidence: float | None = None
    span: tuple[int, int] | None = None  # where an answer stands in its context


@dataclass(frozen=True)
class Highlight:
    """A stretch of text: as it is, rightly found, wrongly said, or right and not found."""

    text: str
    kind: HighlightKind = ""
    note: str = ""


@dataclass(frozen=True)
class ErrorCase:
    """A wrong prediction."""

    location: str
    predicted: str
    gold: str
    confidence: float | None
    lines: tuple[tuple[Highlight, ...], ...]
    image: str = ""  # as a page has it inside, data:image/png;…


def error_size(scored_example: ScoredExample) -> float:
    """How wrong a prediction is: 0 where it is right; 1 where nothing of it is; of numbers how far away."""
    example, prediction, gold = scored_example.example, scored_example.prediction, scored_example.gold
    if isinstance(example, QAExample):
        return _answer_error(_answer_text(prediction), [answer.text for answer in example.answers] or [""])
    if isinstance(gold, float) and isinstance(prediction, int | float):
        return float(abs(prediction - gold))
    if isinstance(example, TaggedExample):
        num_wrong = sum(predicted_tag != gold_tag for predicted_tag, gold_tag in zip(prediction, gold, strict=True))
        return float(num_wrong / max(len(gold), 1))
    if isinstance(prediction, Set) or isinstance(gold, Set):
        return float(set(prediction) != set(gold))
    return float(prediction != gold)


def _answer_error(prediction: str, answers: Sequence[str]) -> float:
    return 0.0 if any(exact_match(prediction, answer) for answer in answers) else 1 - max(answer_f1(prediction, answer) for answer in answers)


def _answer_text(answer: Any) -> str:
    """Of an answer that has more to it, what is answered."""
    return str(getattr(answer, "text", answer) or "")


def make_case(scored_example: ScoredExample) -> ErrorCase:
    """A prediction as a page shows it."""
    example = scored_example.example
    render = _RENDERERS.get(type(example), _render_default)
    return ErrorCase(
        getattr(example, "location", ""),
        _format_value(_answer_text(scored_example.prediction) if isinstance(example, QAExample) else scored_example.prediction, example),
        _format_value(_gold_value(scored_example), example),
        scored_example.confidence,
        render(scored_example),
        _image_data_url(example) if isinstance(example, ImageExample) else "",
    )


def _image_data_url(example: ImageExample) -> str:
    return f"data:image/png;base64,{base64.b64encode(thumbnail_png(example.image, _THUMBNAIL_SIZE)).decode()}"


def _gold_value(scored_example: ScoredExample) -> Any:
    """Of several answers the first."""
    if isinstance(scored_example.example, QAExample):
        return next((answer.text for answer in scored_example.example.answers), "")
    return scored_example.gold


def _format_value(value: Any, example: Any) -> str:
    if isinstance(example, MultipleChoiceExample) and isinstance(value, int):
        return f"{value + 1}: {_truncate(example.choices[value], 80)}" if 0 <= value < len(example.choices) else str(value)
    if isinstance(example, TaggedExample):
        return ""  # said word by word
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Set | tuple | list):
        return ", ".join(sorted(map(str, value))) or _NONE_TEXT
    return _truncate(str(value), 120) if value is not None and value != "" else _NONE_TEXT


def _render_default(scored_example: ScoredExample) -> tuple[tuple[Highlight, ...], ...]:
    return ((Highlight(_truncate(str(scored_example.example))),),)


def _render_texts(scored_example: ScoredExample) -> tuple[tuple[Highlight, ...], ...]:
    texts = [scored_example.example.text, scored_example.example.text_pair]
    return tuple((Highlight(_truncate(text)),) for text in texts if text is not None)


def _render_tags(scored_example: ScoredExample) -> tuple[tuple[Highlight, ...], ...]:
    """The sentence; a word is marked where its tag is wrong, or is right and says something."""
    example, highlights, end = scored_example.example, [], 0
    words = zip(example.words, example.word_starts, scored_example.prediction, scored_example.gold, strict=True)
    for word, start, predicted_tag, gold_tag in words:
        highlights.append(Highlight(example.text[end:start]))
        end = start + len(word)
        if predicted_tag == gold_tag:
            highlights.append(Highlight(word) if gold_tag == "O" else Highlight(word, "correct", gold_tag))
        else:
            kind: HighlightKind = "missed" if predicted_tag == "O" else "wrong"
            highlights.append(Highlight(word, kind, f"{predicted_tag}, not {gold_tag}"))
    highlights.append(Highlight(example.text[end:]))
    return (tuple(highlight for highlight in highlights if highlight.text),)


def _render_question(scored_example: ScoredExample) -> tuple[tuple[Highlight, ...], ...]:
    """The question, and the context with the answer that was given and the first right one."""
    example = scored_example.example
    predicted_span = scored_example.span or _find_answer(example.context, _answer_text(scored_example.prediction))
    gold_span = next(((a.start, a.start + len(a.text)) for a in example.answers), None)
    return ((Highlight(_truncate(example.question)),), _highlight_spans(example.context, predicted_span, gold_span))


def _find_answer(context: str, answer: str) -> tuple[int, int] | None:
    start = context.find(answer) if answer else -1
    return (start, start + len(answer)) if start >= 0 else None


def _highlight_spans(text: str, predicted_span: tuple[int, int] | None, gold_span: tuple[int, int] | None) -> tuple[Highlight, ...]:
    """A text with what was said and what is right in it; they may overlap. Far from both it is left out."""
    spans = [span for span in (predicted_span, gold_span) if span is not None]
    edges = sorted({0, len(text), *(edge for span in spans for edge in span)})
    highlights = []
    for start, end in pairwise(edges):
        inside = [span is not None and span[0] <= start and end <= span[1] for span in (predicted_span, gold_span)]
        kind: HighlightKind = "correct" if all(inside) else "wrong" if inside[0] else "missed" if inside[1] else ""
        note = {"wrong": "predicted", "missed": "gold", "correct": "correct", "": ""}[kind]
        highlights.append(
            Highlight(text[start:end] if kind else _trim_context(text[start:end], start > 0, end < len(text)), kind, note)
        )
    return tuple(highlights)


def _trim_context(text: str, keep_start: bool, keep_end: bool) -> str:
    """What of an unmarked stretch is near to a mark: its beginning, its end, or both."""
    if not keep_start and not keep_end:
        return _truncate(text)
    if len(text) <= _CONTEXT_CHARS * (keep_start + keep_end):
        return text
    return (text[:_CONTEXT_CHARS] if keep_start else "") + " … " + (text[-_CONTEXT_CHARS:] if keep_end else "")


def _render_choices(scored_example: ScoredExample) -> tuple[tuple[Highlight, ...], ...]:
    example = scored_example.example
    lines: list[tuple[Highlight, ...]] = [(Highlight(_truncate(text)),) for text in (example.context, example.text_pair) if text]
    for number, choice in enumerate(example.choices):
        is_predicted, is_gold = (value in (number, choice) for value in (scored_example.prediction, scored_example.gold))
        kind: HighlightKind = "correct" if is_predicted and is_gold else "wrong" if is_predicted else "missed" if is_gold else ""
        note = {"correct": "correct", "wrong": "predicted", "missed": "gold", "": ""}[kind]
        lines.append((Highlight(f"{number + 1}. "), Highlight(_truncate(choice), kind, note)))
    return tuple(lines)


def _render_nothing(scored_example: ScoredExample) -> tuple[tuple[Highlight, ...], ...]:  # noqa: ARG001  # a picture has no text
    return ()


_RENDERERS = {TextExample: _render_texts, TaggedExample: _render_tags, QAExample: _render_question, MultipleChoiceExample: _render_choices, ImageExample: _render_nothing}


def _truncate(text: str, max_chars: int = _MAX_CHARS) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}…"
