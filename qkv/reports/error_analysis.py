"""Wrong predictions as a report shows them: correct, wrong and missed parts of the input are highlighted.

Each kind of example has a view that measures, formats and renders its predictions. The default view serves any example
class; it uses the methods of `qkv.data.examples.Example` only.
"""

from __future__ import annotations

import base64
from collections.abc import Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from qkv.data.examples import ImageExample, MultipleChoiceExample, QAExample, TaggedExample
from qkv.data.image_files import thumbnail_png
from qkv.data.tagging_schemes import OUTSIDE
from qkv.metrics.squad import answer_f1, exact_match

HighlightKind = Literal["", "correct", "wrong", "missed"]
_MAX_CHARS = 1200  # shown characters of a text
_CONTEXT_CHARS = 200  # shown characters of a context before and after a highlight
_THUMBNAIL_SIZE = 112  # pixels of the longer side of a shown image
_NONE_TEXT = "(none)"


@dataclass(frozen=True)
class ScoredExample:
    """An example with the model's prediction and the gold label."""

    example: Any
    prediction: Any
    gold: Any
    confidence: float | None = None
    span: tuple[int, int] | None = None  # characters of the context that are the predicted answer


@dataclass(frozen=True)
class Highlight:
    """A part of a text: plain, correct (predicted and gold), wrong (only predicted) or missed (only gold)."""

    text: str
    kind: HighlightKind = ""
    note: str = ""


Lines = tuple[tuple[Highlight, ...], ...]


@dataclass(frozen=True)
class ErrorCase:
    """A wrong prediction in the form in which a report shows it."""

    location: str
    predicted: str
    gold: str
    confidence: float | None
    lines: Lines
    image: str = ""  # a data URL


def error_size(scored_example: ScoredExample) -> float:
    """Return 0 for a correct prediction, up to 1 for a wrong one; the absolute difference for numbers."""
    return _view(scored_example.example).error_size(scored_example)


def make_case(scored_example: ScoredExample) -> ErrorCase:
    """Return a prediction in the form in which a report shows it."""
    example = scored_example.example
    view = _view(example)
    return ErrorCase(
        getattr(example, "location", ""),
        view.predicted_text(scored_example),
        view.gold_text(scored_example),
        scored_example.confidence,
        view.lines(scored_example),
        view.image_url(scored_example),
    )


class ExampleView:
    """Default view: compare prediction and gold label as values, and show the texts of the example."""

    def error_size(self, scored_example: ScoredExample) -> float:
        """Return the size of the error as `error_size` defines it."""
        prediction, gold = scored_example.prediction, scored_example.gold
        if isinstance(gold, float) and isinstance(prediction, int | float):
            return float(abs(prediction - gold))
        if isinstance(prediction, Set) or isinstance(gold, Set):
            return float(set(prediction) != set(gold))
        return float(prediction != gold)

    def predicted_text(self, scored_example: ScoredExample) -> str:
        """Return the prediction as text."""
        return _format_value(scored_example.prediction)

    def gold_text(self, scored_example: ScoredExample) -> str:
        """Return the gold label as text."""
        return _format_value(scored_example.gold)

    def lines(self, scored_example: ScoredExample) -> Lines:
        """Return the lines of the input with highlights."""
        return tuple((Highlight(_truncate(text)),) for text in scored_example.example.iter_texts())

    def image_url(self, scored_example: ScoredExample) -> str:  # noqa: ARG002  # only images have one
        """Return the image of the example as a data URL, or an empty text."""
        return ""


class TaggedView(ExampleView):
    """A sentence in which each word has a predicted and a gold tag."""

    def error_size(self, scored_example: ScoredExample) -> float:
        """Return the fraction of wrong tags."""
        tag_pairs = zip(scored_example.prediction, scored_example.gold, strict=True)
        num_wrong = sum(predicted_tag != gold_tag for predicted_tag, gold_tag in tag_pairs)
        return float(num_wrong / max(len(scored_example.gold), 1))

    def predicted_text(self, scored_example: ScoredExample) -> str:  # noqa: ARG002
        """Return an empty text: the tags are shown at their words."""
        return ""

    gold_text = predicted_text

    def lines(self, scored_example: ScoredExample) -> Lines:
        """Return the sentence; words with a wrong tag, or with a correct one other than O, are highlighted."""
        example, highlights, end = scored_example.example, [], 0
        words = zip(example.words, example.word_starts, scored_example.prediction, scored_example.gold, strict=True)
        for word, start, predicted_tag, gold_tag in words:
            highlights.append(Highlight(example.text[end:start]))
            end = start + len(word)
            if predicted_tag == gold_tag:
                highlights.append(Highlight(word) if gold_tag == OUTSIDE else Highlight(word, "correct", gold_tag))
            else:
                kind: HighlightKind = "missed" if predicted_tag == OUTSIDE else "wrong"
                highlights.append(Highlight(word, kind, f"{predicted_tag}, not {gold_tag}"))
        highlights.append(Highlight(example.text[end:]))
        return (tuple(highlight for highlight in highlights if highlight.text),)


class QAView(ExampleView):
    """A question and its context, in which predicted and gold answer are highlighted."""

    def error_size(self, scored_example: ScoredExample) -> float:
        """Return 1 minus the best token F1 with a gold answer; 0 for an exact match."""
        prediction = _answer_text(scored_example.prediction)
        answers = [answer.text for answer in scored_example.example.answers] or [""]
        if any(exact_match(prediction, answer) for answer in answers):
            return 0.0
        return 1 - max(answer_f1(prediction, answer) for answer in answers)

    def predicted_text(self, scored_example: ScoredExample) -> str:
        """Return the text of the predicted answer."""
        return _format_value(_answer_text(scored_example.prediction))

    def gold_text(self, scored_example: ScoredExample) -> str:
        """Return the first gold answer."""
        return _format_value(next((answer.text for answer in scored_example.example.answers), ""))

    def lines(self, scored_example: ScoredExample) -> Lines:
        """Return the question, and the context with the predicted and the first gold answer."""
        example = scored_example.example
        predicted_span = scored_example.span or _find_answer(example.context, _answer_text(scored_example.prediction))
        gold_span = next(((a.start, a.start + len(a.text)) for a in example.answers), None)
        return ((Highlight(_truncate(example.question)),), _highlight_spans(example.context, predicted_span, gold_span))


class ChoiceView(ExampleView):
    """A context and its numbered choices."""

    def predicted_text(self, scored_example: ScoredExample) -> str:
        """Return the number and the text of the predicted choice."""
        return self._choice_text(scored_example.prediction, scored_example.example)

    def gold_text(self, scored_example: ScoredExample) -> str:
        """Return the number and the text of the gold choice."""
        return self._choice_text(scored_example.gold, scored_example.example)

    def lines(self, scored_example: ScoredExample) -> Lines:
        """Return the context and one line per choice; predicted and gold choice are highlighted."""
        example = scored_example.example
        texts = [text for text in (example.context, example.text_pair) if text]
        lines: list[tuple[Highlight, ...]] = [(Highlight(_truncate(text)),) for text in texts]
        for number, choice in enumerate(example.choices):
            is_predicted = scored_example.prediction in (number, choice)
            kind = _highlight_kind(is_predicted, scored_example.gold in (number, choice))
            lines.append((Highlight(f"{number + 1}. "), Highlight(_truncate(choice), kind, _NOTES[kind])))
        return tuple(lines)

    @staticmethod
    def _choice_text(index: Any, example: MultipleChoiceExample) -> str:
        if not isinstance(index, int):
            return _format_value(index)
        if not 0 <= index < len(example.choices):
            return str(index)
        return f"{index + 1}: {_truncate(example.choices[index], 80)}"


class ImageView(ExampleView):
    """An image, shown as a thumbnail."""

    def image_url(self, scored_example: ScoredExample) -> str:
        """Return a thumbnail as a data URL."""
        png = thumbnail_png(scored_example.example.image, _THUMBNAIL_SIZE)
        return f"data:image/png;base64,{base64.b64encode(png).decode()}"


_DEFAULT_VIEW = ExampleView()
_VIEWS: dict[type, ExampleView] = {
    TaggedExample: TaggedView(),
    QAExample: QAView(),
    MultipleChoiceExample: ChoiceView(),
    ImageExample: ImageView(),
}
_NOTES: dict[HighlightKind, str] = {"correct": "correct", "wrong": "predicted", "missed": "gold", "": ""}


def _view(example: Any) -> ExampleView:
    return _VIEWS.get(type(example), _DEFAULT_VIEW)


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Set | tuple | list):
        return ", ".join(sorted(map(str, value))) or _NONE_TEXT
    return _truncate(str(value), 120) if value is not None and value != "" else _NONE_TEXT


def _answer_text(answer: Any) -> str:
    """Return the text of an answer, given as text or as an object with a `text`."""
    return str(getattr(answer, "text", answer) or "")


def _find_answer(context: str, answer: str) -> tuple[int, int] | None:
    start = context.find(answer) if answer else -1
    return (start, start + len(answer)) if start >= 0 else None


def _highlight_kind(is_predicted: bool, is_gold: bool) -> HighlightKind:
    if is_predicted:
        return "correct" if is_gold else "wrong"
    return "missed" if is_gold else ""


def _highlight_spans(
    text: str, predicted_span: tuple[int, int] | None, gold_span: tuple[int, int] | None
) -> tuple[Highlight, ...]:
    """Highlight two spans of a text, which may overlap. Text far from both is left out."""

    def covers(span: tuple[int, int] | None, start: int, end: int) -> bool:
        return span is not None and span[0] <= start and end <= span[1]

    spans = [span for span in (predicted_span, gold_span) if span is not None]
    edges = sorted({0, len(text), *(edge for span in spans for edge in span)})
    highlights = []
    for start, end in pairwise(edges):
        kind = _highlight_kind(covers(predicted_span, start, end), covers(gold_span, start, end))
        section = text[start:end] if kind else _trim_context(text[start:end], start > 0, end < len(text))
        highlights.append(Highlight(section, kind, _NOTES[kind]))
    return tuple(highlights)


def _trim_context(text: str, keep_start: bool, keep_end: bool) -> str:
    """Shorten a section without highlights to the characters next to a highlight: its start, its end, or both."""
    if not keep_start and not keep_end:
        return _truncate(text)
    if len(text) <= _CONTEXT_CHARS * (keep_start + keep_end):
        return text
    return (text[:_CONTEXT_CHARS] if keep_start else "") + " … " + (text[-_CONTEXT_CHARS:] if keep_end else "")


def _truncate(text: str, max_chars: int = _MAX_CHARS) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}…"
