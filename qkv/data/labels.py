"""The classes of a set of examples: collect those of the training set, refuse others later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from qkv.data.examples import Example, Examples, ExampleT, MultipleChoiceExample, QAExample
from qkv.errors import InputError, quote

_MAX_SHOWN = 12  # labels listed in a message


def collect_labels(examples: Iterable[ExampleT]) -> list[str]:
    """Return all classes that occur in the examples, sorted. Numbers are not classes."""
    return sorted({label for example in examples for label, _ in example.iter_classes()})


def check_labels(known: Iterable[str], examples: Sequence[ExampleT], skip_bad: bool = False) -> Examples[ExampleT]:
    """Check that all classes of the examples are `known`, and return the examples.

    With `skip_bad`, examples with an unknown class are left out and listed in `skipped`.
    """
    known = list(known)
    known_set = set(known)
    valid_examples: Examples[ExampleT] = Examples()
    for example in examples:
        unknown = next(((label, note) for label, note in example.iter_classes() if label not in known_set), None)
        if unknown is None:
            valid_examples.append(example)
            continue
        label, note = unknown
        shown = _format_labels(known)
        message = f"{example.location}: label {quote(label)}{note} was never seen in training; known: {shown}"
        if not skip_bad:
            raise InputError(message)
        valid_examples.skipped.append(message)
    return valid_examples


def describe_labels(examples: Sequence[Example]) -> str | None:
    """Return a line with the labels of examples and how often each occurs; None if they have none to count."""
    numbers = [example.gold for example in examples if isinstance(example.gold, float)]
    if numbers:
        mean = sum(numbers) / len(numbers)
        return f"labels: numbers from {min(numbers):g} to {max(numbers):g}, {mean:.4g} on average"
    counts = Counter(label for example in examples for label, _ in example.iter_classes())
    choices = Counter(example.label for example in examples if isinstance(example, MultipleChoiceExample))
    counts.update({f"choice {index}": choices[index] for index in sorted(choices, key=str) if index is not None})
    answers = Counter(example.answerable for example in examples if isinstance(example, QAExample))
    counts.update({name: answers[key] for key, name in ((True, "answerable"), (False, "unanswerable")) if answers[key]})
    if not counts:
        return None
    shown = ", ".join(f"{quote(label)[1:-1]} {count:,}" for label, count in counts.most_common(_MAX_SHOWN))
    more = len(counts) - _MAX_SHOWN
    rare = f" and {more:,} more, the rarest {min(counts.values()):,}" if more > 0 else ""
    return f"{len(counts):,} label{'s' if len(counts) > 1 else ''}: {shown}{rare}"


def _format_labels(labels: Sequence[str]) -> str:
    more = len(labels) - _MAX_SHOWN
    return ", ".join(quote(label)[1:-1] for label in labels[:_MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")
