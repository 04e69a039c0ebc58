"""Pairs of source and target text (translation, summarization), and sources with several references."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Self

from qkv.data.examples import Example


@dataclass(frozen=True, slots=True)
class Pair(Example):
    """A source with one of its targets, and the location ("file:line") they were read from."""

    source: str
    target: str
    location: str = ""

    @property
    def gold(self) -> str | None:
        """The target; None if it is empty."""
        return self.target or None

    def without_label(self) -> Self:
        """Return a copy with an empty target."""
        return replace(self, target="")

    def iter_texts(self) -> Iterator[str]:
        """Yield the source."""
        yield self.source

    def split_key(self) -> str:
        """Return the source, so that all targets of a source are in one split."""
        return self.source

    def pairs(self) -> list[Pair]:
        """Return the pair in a list, as `SourceWithReferences.pairs` returns all of its pairs."""
        return [self]


@dataclass(frozen=True, slots=True)
class SourceWithReferences(Example):
    """A source with all targets that count as correct, and the location of the first one."""

    source: str
    references: tuple[str, ...]
    location: str

    @property
    def gold(self) -> tuple[str, ...] | None:
        """The references; None if there are none."""
        return self.references or None

    def without_label(self) -> Self:
        """Return a copy without references."""
        return replace(self, references=())

    def iter_texts(self) -> Iterator[str]:
        """Yield the source."""
        yield self.source

    def split_key(self) -> str:
        """Return the source."""
        return self.source

    def pairs(self) -> list[Pair]:
        """Return one pair per reference: in training, each reference is a target of its own."""
        return [Pair(self.source, reference, self.location) for reference in self.references]


def group_by_source(pairs: Iterable[Pair]) -> list[SourceWithReferences]:
    """Collect the distinct targets of each source; sources and targets stay in the order of first occurrence."""
    targets: dict[str, dict[str, None]] = {}  # the inner dict is an ordered set
    locations: dict[str, str] = {}
    for pair in pairs:
        targets.setdefault(pair.source, {})[pair.target] = None
        locations.setdefault(pair.source, pair.location)
    return [
        SourceWithReferences(source, tuple(references), locations[source]) for source, references in targets.items()
    ]
