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
from qkv.metrics.classification import Average, Label, PrecisionRecallF1, check_sequences
from qkv.metrics.metric import Stats

Scheme = Literal["lenient", "bio", "bioes"]
SCHEMES: tuple[Scheme, ...] = ("lenient", "bio", "bioes")
_OUTSIDE = ("O", "")


class Entity(NamedTuple):
    """Tokens `start` to `end`, the latter not included."""

    type: str
    start: int
    end: int


def get_entities(tags: Sequence[str], scheme: Scheme = "lenient") -> list[Entity]:
    """The entities of one tagged sentence, in order."""
    split_tags = [split_tag(tag, scheme, f"token {number}") for number, tag in enumerate(tags, 1)]
    continues = [next_prefix in "IE" and previous_prefix in "BI" and previous_type == next_type for (previous_prefix, previous_type), (next_prefix, next_type) in pairwise(split_tags)]
    starts = [position for position, (prefix, _) in enumerate(split_tags) if prefix != "O" and not (position and continues[position - 1])]
    entity_spans = []
    for start in starts:
        end = start + 1
        while end < len(split_tags) and continues[end - 1]:
            end += 1
        if _is_valid_chunk(split_tags[start][0], split_tags[end - 1][0], scheme):
            entity_spans.append(Entity(split_tags[start][1], start, end))
    return entity_spans


def _is_valid_chunk(first_prefix: str, last_prefix: str, scheme: Scheme) -> bool:
    """Whether a run of tags that go on from each other is an entity, by its first and last prefix."""
    if scheme == "bio":
        return first_prefix == "B"
    return scheme == "lenient" or first_prefix == "S" or (first_prefix == "B" and last_prefix == "E")


def split_tag(tag: str, scheme: Scheme, location: str) -> tuple[str, str]:
    """Prefix and type of a tag; one without a type has the type _. One of another scheme is refused by its place."""
    if tag == "O":
        return _OUTSIDE
    prefix, hyphen, entity_type = tag.partition("-")
    known_prefixes = "BI" if scheme == "bio" else "BIES"
    if len(prefix) != 1 or prefix not in known_prefixes or (hyphen and not entity_type):
        expected = " ".join(f"{letter}-TYPE" for letter in known_prefixes)
        raise InputError(f"{location}: '{tag}' is not one of the tags {expected} O; convert the tags, or correct it")
    return prefix, entity_type or "_"


def collect_entity_types(*sides: Iterable[Sequence[str]], scheme: Scheme = "lenient") -> tuple[str, ...]:
    """Every type that occurs, in order."""
    return tuple(sorted({e.type for side in sides for tags in side for e in get_entities(tags, scheme)}))


@dataclass(frozen=True)
class EntityF1(PrecisionRecallF1[Sequence[str], Sequence[str]]):
    """Precision, recall and F1 of entities of the types `labels`; micro is CoNLL's figure."""

    name: ClassVar[str] = "entity_f1"
    labels: tuple[Label, ...]
    scheme: Scheme = "lenient"
    average: Average = "micro"

    def labels_to_count(self, hypothesis: Sequence[str], reference: Sequence[str]) -> tuple[Iterable[Label], ...]:
        predicted, gold = set(get_entities(hypothesis, self.scheme)), set(get_entities(reference, self.scheme))
        return tuple([e.type for e in group] for group in (predicted & gold, predicted, gold))

    def statistics(self, hypotheses: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Stats:
        check_sequences(hypotheses, references)
        return super().statistics(hypotheses, references)

    def signature(self, references: Sequence[Sequence[str]]) -> str:  # noqa: ARG002
        return "tags read as conlleval does" if self.scheme == "lenient" else f"strict {self.scheme.upper()}"
