"""Which labels the examples have, and which they should not have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from qkv.data.examples import Examples, ImageExample, TaggedExample, TextExample
from qkv.errors import InputError

LabeledExample = TextExample | TaggedExample | ImageExample
_MAX_SHOWN = 12  # labels listed in a message: a line that a person can read


def collect_labels(examples: Iterable[LabeledExample]) -> list[str]:
    """Every class that some example has, sorted; numbers are no classes."""
    return sorted({label for example in examples for label, _ in _iter_labels(example)})


def check_labels(known: Iterable[str], examples: Sequence[LabeledExample], skip_bad: bool = False) -> Examples[LabeledExample]:
    """The examples, none with a label that is not `known` from training; with `skip_bad` those that have one are
    left out and listed."""
    known = list(known)
    known_set = set(known)
    valid_examples: Examples[LabeledExample] = Examples()
    for example in examples:
        unknown = next(((label, word) for label, word in _iter_labels(example) if label not in known_set), None)
        if unknown is None:
            valid_examples.append(example)
            continue
        label, word = unknown
        message = f"{example.location}: label '{label}'{word} was never seen in training; known: {_format_labels(known)}"
        if not skip_bad:
            raise InputError(message)
        valid_examples.skipped.append(message)
    return valid_examples


def _iter_labels(example: LabeledExample) -> Iterator[tuple[str, str]]:
    """Each class of an example, with the word that has it if a word has it."""
    if isinstance(example, TaggedExample):
        tags = example.tags or ()
        yield from ((tag, f" of '{word}'") for word, tag in zip(example.words, tags, strict=bool(tags)))
    elif isinstance(example.label, tuple):
        yield from ((label, "") for label in example.label)
    elif isinstance(example.label, str):
        yield example.label, ""


def _format_labels(labels: Sequence[str]) -> str:
    more = len(labels) - _MAX_SHOWN
    return ", ".join(labels[:_MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")
