"""What a task is learned from, one frozen class a kind of example: labelled, tagged, asked, chosen, pictured.

Sources with their targets (translation, summaries) are `qkv.data.pair`'s. Every example knows its `location`, "file:line"
or "file: id", so that whatever is wrong with it later can still be found. An example's `split_key` is hashed to decide
which split it falls in; the names in it are those of the first runs, whose splits have to stay what they were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from qkv.errors import InputError

ExampleT = TypeVar("ExampleT")

# A class, a number (regression), several classes at once (perhaps none), or None where nobody has said.
Label = str | float | tuple[str, ...] | None


class Examples(list[ExampleT]):
    """What was read of a file, with one line for each thing in it that was skipped."""

    def __init__(self, examples: Iterable[ExampleT] = (), skipped: Iterable[str] = ()) -> None:
        super().__init__(examples)
        self.skipped = list(skipped)


@dataclass(frozen=True, slots=True)
class Span:
    """The characters [start, end) of one of an example's texts."""

    start: int
    end: int
    name: str = ""  # what is marked: a slot, or which of two mentions
    in_text_pair: bool = False  # counted in the second text


@dataclass(frozen=True, slots=True)
class TextExample:
    """One text or two with their label, and the places in them that the label is about."""

    text: str
    location: str
    text_pair: str | None = None
    label: Label = None
    spans: tuple[Span, ...] = ()
    id: str = ""
    group: str = ""  # the same in examples that a metric takes together, e.g. the answers to one question of MultiRC

    def span_text(self, span: Span) -> str:
        """The characters of a span."""
        return ((self.text_pair or "") if span.in_text_pair else self.text)[span.start : span.end]

    def split_key(self) -> str:
        """What decides which split it falls in: all but its location, under names that never change."""
        spans = ", ".join(
            f"Span(start={span.start!r}, end={span.end!r}, name={span.name!r}, second={span.in_text_pair!r})"
            for span in self.spans
        )
        spans += "," if len(self.spans) == 1 else ""  # as Python writes a tuple of one
        texts = f"text={self.text!r}, where='', second={self.text_pair!r}"
        return f"Labelled({texts}, label={self.label!r}, spans=({spans}), id={self.id!r}, group={self.group!r})"


@dataclass(frozen=True, slots=True)
class TaggedExample:
    """The words of a sentence with a tag each; `text[start : start + len(word)]` is the word."""

    text: str
    words: tuple[str, ...]
    word_starts: tuple[int, ...]
    tags: tuple[str, ...] | None
    location: str
    id: str = ""

    def split_key(self) -> str:
        """What decides which split it falls in: all but its location, under names that never change."""
        words = f"text={self.text!r}, words={self.words!r}, starts={self.word_starts!r}, tags={self.tags!r}"
        return f"Tagged({words}, where='', id={self.id!r})"


@dataclass(frozen=True, slots=True)
class Answer:
    """Characters of a context, from `start` on."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class QAExample:
    """A question whose answer stands in its context; of several answers each is right."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]
    location: str
    answerable: bool | None = True  # None where nobody has said, as in a test set
    candidates: tuple[Answer, ...] = ()  # what the answer is to be chosen from (ReCoRD's entities), if not any span
    title: str = ""  # of the article that the context is from

    def split_key(self) -> str:
        """What decides which split it falls in: its context, or a model is asked about texts that it has learned."""
        return self.context


@dataclass(frozen=True, slots=True)
class MultipleChoiceExample:
    """A context, perhaps a second part between it and the options, and which option is right."""

    context: str
    choices: tuple[str, ...]
    label: int | None
    location: str
    text_pair: str | None = None
    id: str = ""

    def split_key(self) -> str:
        """What decides which split it falls in: all but its location, under names that never change."""
        choices = f"context={self.context!r}, options={self.choices!r}, right={self.label!r}"
        return f"Choice({choices}, where='', second={self.text_pair!r}, id={self.id!r})"


Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)  # arrays have no single truth value to compare by
class ImageExample:
    """A picture and the class of what it shows."""

    image: Pixels | Path  # [H, W] or [H, W, C], a view of a larger array; or a file, opened when it is needed
    location: str
    label: str | None = None
    id: str = ""

    def split_key(self) -> str:
        """What decides which split it falls in: its pixels."""
        return self.content_hash().hex()

    def content_hash(self) -> bytes:
        """The same for the same picture, wherever it lies."""
        if isinstance(self.image, Path):
            try:
                content = self.image.read_bytes()
            except OSError as error:
                raise InputError(f"{self.location}: cannot be read ({error.strerror})") from None
        else:
            content = str(self.image.shape).encode() + self.image.tobytes()
        return hashlib.blake2b(content, digest_size=16).digest()


def check_span(start: int, end: int, text: str, location: str, span_name: str = "span") -> None:
    """A span has to lie in its text and to hold a character."""
    if not 0 <= start < end <= len(text):
        reason = f"the text has {len(text)} characters" if start < end else "it holds no character"
        raise InputError(f"{location}: the {span_name} {start}–{end} lies outside its text: {reason}; correct its offsets")
