"""Which labels the examples have, and which they should not have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from qkv.data.examples import Examples, Labelled, Pictured, Tagged
from qkv.errors import InputError

Classified = Labelled | Tagged | Pictured
_SHOWN = 12  # labels listed in a message: a line that a person can read


def labels_of(examples: Iterable[Classified]) -> list[str]:
    """Every class that some example has, sorted; numbers are no classes."""
    return sorted({label for example in examples for label, _ in _labels(example)})


def check_labels(known: Iterable[str], examples: Sequence[Classified], skip_bad: bool = False) -> Examples[Classified]:
    """The examples, none with a label that is not `known` from training; with `skip_bad` those that have one are
    left out and listed."""
    known = list(known)
    wanted = set(known)
    good: Examples[Classified] = Examples()
    for example in examples:
        unseen = next(((label, word) for label, word in _labels(example) if label not in wanted), None)
        if unseen is None:
            good.append(example)
            continue
        label, word = unseen
        said = f"{example.where}: label '{label}'{word} was never seen in training; known: {_listed(known)}"
        if not skip_bad:
            raise InputError(said)
        good.skipped.append(said)
    return good


def _labels(example: Classified) -> Iterator[tuple[str, str]]:
    """Each class of an example, with the word that has it if a word has it."""
    if isinstance(example, Tagged):
        tags = example.tags or ()
        yield from ((tag, f" of '{word}'") for word, tag in zip(example.words, tags, strict=bool(tags)))
    elif isinstance(example.label, tuple):
        yield from ((label, "") for label in example.label)
    elif isinstance(example.label, str):
        yield example.label, ""


def _listed(labels: Sequence[str]) -> str:
    more = len(labels) - _SHOWN
    return ", ".join(labels[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
