"""The classes of a set of examples: collect those of the training set, refuse others later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qkv.data.examples import Examples, ExampleT
from qkv.errors import InputError

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
        message = f"{example.location}: label '{label}'{note} was never seen in training; known: {shown}"
        if not skip_bad:
            raise InputError(message)
        valid_examples.skipped.append(message)
    return valid_examples


def _format_labels(labels: Sequence[str]) -> str:
    more = len(labels) - _MAX_SHOWN
    return ", ".join(labels[:_MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")
