"""Examples of the tasks: labeled texts, tagged sentences, questions, multiple choice, images.

Pairs of source and target text (translation, summarization) are in `qkv.data.pair`. Every example has a `location`,
"file:line" or "file: id", for messages about it.

A `split_key()` is hashed to assign an example to a split. Its text contains the class and field names of the first
release: changing them would move examples between the splits of existing runs.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from qkv.errors import InputError, quote

ExampleT = TypeVar("ExampleT", bound="Example")
Label = str | float | tuple[str, ...] | None  # a class, a number (regression), any number of classes, or unlabeled
Pixels = npt.NDArray[np.uint8]


class Example(ABC):
    """Base of all example classes: one input of a task with its label, if it has one."""

    __slots__ = ()

    location: str

    @property
    @abstractmethod
    def gold(self) -> Any:
        """The label as it was read, or None if the example is unlabeled."""

    @property
    def is_labeled(self) -> bool:
        """Whether the example has a label."""
        return self.gold is not None

    @abstractmethod
    def without_label(self) -> Self:
        """Return a copy without the label, for prediction."""

    @abstractmethod
    def iter_texts(self) -> Iterator[str]:
        """Yield the input texts of the example, in reading order; the label is not among them."""

    def to_line(self) -> str:
        """Return the input as one line, as `qkv predict` reads it: the texts with tabs between them."""
        return "\t".join(self.iter_texts())

    @abstractmethod
    def split_key(self) -> str:
        """Return the text whose hash assigns the example to a split. It never depends on the location."""

    def iter_classes(self) -> Iterator[tuple[str, str]]:
        """Yield each class of the label with a note for messages on the part of the input that has it."""
        return iter(())


class Examples(list[ExampleT]):
    """The examples of a file, with what its reader has to say about it."""

    def __init__(self, examples: Iterable[ExampleT] = (), skipped: Iterable[str] = ()) -> None:
        super().__init__(examples)
        self.skipped = list(skipped)
        """One line for each record that was skipped."""
        self.notes: list[str] = []
        """Lines for the user, such as a delimiter that was detected."""
        self.detected: dict[str, dict[str, str]] = {}
        """Options of the reader that were detected, by file: delimiter, encoding."""

    def derive(self, examples: Iterable[ExampleT] = ()) -> Examples[ExampleT]:
        """Return other examples of the same file, such as a selection."""
        derived = Examples(examples, self.skipped)
        derived.notes, derived.detected = list(self.notes), dict(self.detected)
        return derived


@dataclass(frozen=True, slots=True)
class Span:
    """The characters [start, end) of one of an example's texts."""

    start: int
    end: int
    name: str = ""  # the slot, or which of two mentions
    in_text_pair: bool = False  # the offsets count in `text_pair`


@dataclass(frozen=True, slots=True)
class TextExample(Example):
    """One or two texts with their label, and the spans of the texts that the label refers to."""

    text: str
    location: str
    text_pair: str | None = None
    label: Label = None
    spans: tuple[Span, ...] = ()
    id: str = ""
    group: str = ""  # equal in examples that a metric scores together, e.g. the answers to one question of MultiRC

    @property
    def gold(self) -> Label:
        """The class, number or classes; None if unlabeled."""
        return self.label

    def without_label(self) -> Self:
        """Return a copy without the label. Spans stay: they may mark the input, as in WiC."""
        return replace(self, label=None)

    def iter_texts(self) -> Iterator[str]:
        """Yield the text, then the second one if there is one."""
        yield self.text
        if self.text_pair is not None:
            yield self.text_pair

    def iter_classes(self) -> Iterator[tuple[str, str]]:
        """Yield each class; a number is not a class."""
        if isinstance(self.label, tuple):
            yield from ((name, "") for name in self.label)
        elif isinstance(self.label, str):
            yield self.label, ""

    def split_key(self) -> str:
        """Return all fields except the location."""
        spans = ", ".join(
            f"Span(start={span.start!r}, end={span.end!r}, name={span.name!r}, second={span.in_text_pair!r})"
            for span in self.spans
        )
        spans += "," if len(self.spans) == 1 else ""  # the repr of a tuple with one item
        texts = f"text={self.text!r}, where='', second={self.text_pair!r}"
        return f"Labelled({texts}, label={self.label!r}, spans=({spans}), id={self.id!r}, group={self.group!r})"


@dataclass(frozen=True, slots=True)
class TaggedExample(Example):
    """A sentence with one tag per word; word i is `text[word_starts[i] : word_starts[i] + len(words[i])]`."""

    text: str
    words: tuple[str, ...]
    word_starts: tuple[int, ...]
    tags: tuple[str, ...] | None
    location: str
    id: str = ""

    @property
    def gold(self) -> tuple[str, ...] | None:
        """The tags; None if unlabeled."""
        return self.tags

    def without_label(self) -> Self:
        """Return a copy without the tags."""
        return replace(self, tags=None)

    def iter_texts(self) -> Iterator[str]:
        """Yield the sentence."""
        yield self.text

    def iter_classes(self) -> Iterator[tuple[str, str]]:
        """Yield the tag of each word."""
        tags = self.tags or ()
        yield from ((tag, f" of {quote(word)}") for word, tag in zip(self.words, tags, strict=bool(tags)))

    def split_key(self) -> str:
        """Return all fields except the location."""
        words = f"text={self.text!r}, words={self.words!r}, starts={self.word_starts!r}, tags={self.tags!r}"
        return f"Tagged({words}, where='', id={self.id!r})"


@dataclass(frozen=True, slots=True)
class Answer:
    """A span of a context, given by its text and its first character."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class QAExample(Example):
    """A question whose answer is a span of its context; any of `answers` is correct."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]
    location: str
    answerable: bool | None = True  # None if unlabeled, as in a test set
    candidates: tuple[Answer, ...] = ()  # the spans to choose from (ReCoRD's entities); empty: any span
    title: str = ""  # title of the article that the context is from

    @property
    def gold(self) -> tuple[Answer, ...] | None:
        """The correct answers, empty if the question has none; None if unlabeled."""
        return None if self.answerable is None else self.answers

    def without_label(self) -> Self:
        """Return a copy without the answers."""
        return replace(self, answers=(), answerable=None)

    def iter_texts(self) -> Iterator[str]:
        """Yield the question and the context."""
        yield self.question
        yield self.context

    def split_key(self) -> str:
        """Return the context, so that no held-out question is about a context of the training set."""
        return self.context


@dataclass(frozen=True, slots=True)
class MultipleChoiceExample(Example):
    """A context, optionally a second text between it and each choice, and the index of the correct choice."""

    context: str
    choices: tuple[str, ...]
    label: int | None
    location: str
    text_pair: str | None = None
    id: str = ""

    @property
    def gold(self) -> int | None:
        """The index of the correct choice; None if unlabeled."""
        return self.label

    def without_label(self) -> Self:
        """Return a copy without the index of the correct choice."""
        return replace(self, label=None)

    def iter_texts(self) -> Iterator[str]:
        """Yield the context, the second text if there is one, and the choices."""
        yield self.context
        if self.text_pair is not None:
            yield self.text_pair
        yield from self.choices

    def to_line(self) -> str:
        """Return the texts with tabs between them, without an empty second text."""
        return "\t".join([self.context, *([self.text_pair] if self.text_pair else []), *self.choices])

    def split_key(self) -> str:
        """Return all fields except the location."""
        choices = f"context={self.context!r}, options={self.choices!r}, right={self.label!r}"
        return f"Choice({choices}, where='', second={self.text_pair!r}, id={self.id!r})"


@dataclass(frozen=True, slots=True, eq=False)  # arrays have no single truth value to compare by
class ImageExample(Example):
    """An image with its class."""

    image: Pixels | Path  # [H, W] or [H, W, C], a view of a larger array; or a file, opened when it is needed
    location: str
    label: str | None = None
    id: str = ""

    @property
    def gold(self) -> str | None:
        """The class; None if unlabeled."""
        return self.label

    def without_label(self) -> Self:
        """Return a copy without the class."""
        return replace(self, label=None)

    def iter_texts(self) -> Iterator[str]:
        """Yield nothing: an image has no text."""
        return iter(())

    def iter_classes(self) -> Iterator[tuple[str, str]]:
        """Yield the class."""
        if self.label is not None:
            yield self.label, ""

    def to_line(self) -> str:
        """Return the path of the image file; the location for an image inside a larger file."""
        return str(self.image) if isinstance(self.image, Path) else self.location

    def split_key(self) -> str:
        """Return a hash of the pixels or of the file's content."""
        return self.content_hash().hex()

    def content_hash(self) -> bytes:
        """Return a hash of the pixels or of the file's content, independent of its location."""
        if isinstance(self.image, Path):
            try:
                content = self.image.read_bytes()
            except OSError as error:
                raise InputError(f"{self.location}: cannot be read ({error.strerror})") from None
        else:
            content = str(self.image.shape).encode() + self.image.tobytes()
        return hashlib.blake2b(content, digest_size=16).digest()


def check_span(start: int, end: int, text: str, location: str, span_name: str = "span") -> None:
    """Check that a span is inside its text and not empty."""
    if not 0 <= start < end <= len(text):
        reason = f"the text has {len(text)} characters" if start < end else "it is empty"
        raise InputError(
            f"{location}: the {span_name} {start}–{end} is not inside its text: {reason}; correct its offsets"
        )
