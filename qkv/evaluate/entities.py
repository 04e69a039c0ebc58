"""Entity F1: named entities as spans with a type, right only if both ends and the type are (CoNLL 2000, 2003).

Tags are BIO or BIOES. What a broken sequence means is a choice, and papers differ by it:

- lenient: as CoNLL's script conlleval and seqeval's default read them: I-PER after anything but an open PER begins an
  entity, and an entity ends where it is not gone on with;
- bio, bioes: strict: B I … I, or B I … I E and S, of one type; anything else is no entity (seqeval's strict mode).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal, NamedTuple

from qkv.errors import InputError
from qkv.evaluate.classification import Average, Label, Tally, check_sequences
from qkv.evaluate.metric import Rows

Scheme = Literal["lenient", "bio", "bioes"]
SCHEMES: tuple[Scheme, ...] = ("lenient", "bio", "bioes")
_OUTSIDE = ("O", "")


class Entity(NamedTuple):
    """Tokens `start` to `end`, the latter not included."""

    type: str
    start: int
    end: int


def entities(tags: Sequence[str], scheme: Scheme = "lenient") -> list[Entity]:
    """The entities of one tagged sentence, in order."""
    parts = [tag_parts(tag, scheme, f"token {place}") for place, tag in enumerate(tags, 1)]
    goes_on = [now in "IE" and before in "BI" and one == other for (before, one), (now, other) in pairwise(parts)]
    begins = [p for p, (prefix, _) in enumerate(parts) if prefix != "O" and not (p and goes_on[p - 1])]
    found = []
    for start in begins:
        end = start + 1
        while end < len(parts) and goes_on[end - 1]:
            end += 1
        if _whole(parts[start][0], parts[end - 1][0], scheme):
            found.append(Entity(parts[start][1], start, end))
    return found


def _whole(first: str, last: str, scheme: Scheme) -> bool:
    """Whether a run of tags that go on from each other is an entity, by its first and last prefix."""
    if scheme == "bio":
        return first == "B"
    return scheme == "lenient" or first == "S" or (first == "B" and last == "E")


def tag_parts(tag: str, scheme: Scheme, where: str) -> tuple[str, str]:
    """Prefix and type of a tag; one without a type has the type _. One of another scheme is refused by its place."""
    if tag == "O":
        return _OUTSIDE
    prefix, hyphen, kind = tag.partition("-")
    known = "BI" if scheme == "bio" else "BIES"
    if len(prefix) != 1 or prefix not in known or (hyphen and not kind):
        wanted = " ".join(f"{letter}-TYPE" for letter in known)
        raise InputError(f"{where}: '{tag}' is not one of the tags {wanted} O; convert the tags, or correct it")
    return prefix, kind or "_"


def entity_types(*sides: Iterable[Sequence[str]], scheme: Scheme = "lenient") -> tuple[str, ...]:
    """Every type that occurs, in order."""
    return tuple(sorted({e.type for side in sides for tags in side for e in entities(tags, scheme)}))


@dataclass(frozen=True)
class EntityF1(Tally[Sequence[str], Sequence[str]]):
    """Precision, recall and F1 of entities of the types `labels`; micro is CoNLL's figure."""

    name: ClassVar[str] = "entity_f1"
    labels: tuple[Label, ...]
    scheme: Scheme = "lenient"
    average: Average = "micro"

    def things(self, hypothesis: Sequence[str], reference: Sequence[str]) -> tuple[Iterable[Label], ...]:
        predicted, true = set(entities(hypothesis, self.scheme)), set(entities(reference, self.scheme))
        return tuple([e.type for e in kind] for kind in (predicted & true, predicted, true))

    def statistics(self, hypotheses: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Rows:
        check_sequences(hypotheses, references)
        return super().statistics(hypotheses, references)

    def signature(self, references: Sequence[Sequence[str]]) -> str:  # noqa: ARG002
        return "tags read as conlleval does" if self.scheme == "lenient" else f"strict {self.scheme.upper()}"
