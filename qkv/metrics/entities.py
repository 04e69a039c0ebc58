"""Entity F1: named entities as typed spans, correct only if both ends and the type are (CoNLL 2000, 2003).

Tags are BIO or BIOES. Papers differ in how they read an invalid sequence of tags:

- lenient: as the script conlleval and seqeval by default. I-PER begins an entity unless a PER is open, and an entity
  ends where the next tag does not continue it.
- bio, bioes: strict (seqeval's strict mode). An entity is B I … I, or B I … I E and S, of one type; anything else is
  not an entity.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal, NamedTuple, get_args

from qkv.data.tagging_schemes import OUTSIDE
from qkv.errors import InputError
from qkv.metrics.classification import Average, Label, PrecisionRecallF1, check_sequences
from qkv.metrics.metric import Stats
from qkv.metrics.registry import AllSides, MetricEntry, MetricOptions

EntityScheme = Literal["lenient", "bio", "bioes"]
ENTITY_SCHEMES: tuple[EntityScheme, ...] = get_args(EntityScheme)


class Entity(NamedTuple):
    """The tokens [start, end) with their type."""

    type: str
    start: int
    end: int


def get_entities(tags: Sequence[str], scheme: EntityScheme = "lenient") -> list[Entity]:
    """Return the entities of one tagged sentence, in order."""
    split_tags = [split_tag(tag, scheme, f"token {number}") for number, tag in enumerate(tags, 1)]
    continues = [_continues(previous, following) for previous, following in pairwise(split_tags)]
    starts = [i for i, (prefix, _) in enumerate(split_tags) if prefix != OUTSIDE and not (i and continues[i - 1])]
    entities = []
    for start in starts:
        end = start + 1
        while end < len(split_tags) and continues[end - 1]:
            end += 1
        if _is_valid_chunk(split_tags[start][0], split_tags[end - 1][0], scheme):
            entities.append(Entity(split_tags[start][1], start, end))
    return entities


def _continues(previous: tuple[str, str], following: tuple[str, str]) -> bool:
    """Whether a tag continues the entity of the tag before it."""
    return following[0] in "IE" and previous[0] in "BI" and previous[1] == following[1]


def _is_valid_chunk(first_prefix: str, last_prefix: str, scheme: EntityScheme) -> bool:
    """Whether a sequence of tags that continue each other is an entity, by its first and last prefix."""
    if scheme == "bio":
        return first_prefix == "B"
    return scheme == "lenient" or first_prefix == "S" or (first_prefix == "B" and last_prefix == "E")


def split_tag(tag: str, scheme: EntityScheme, location: str) -> tuple[str, str]:
    """Return prefix and type of a tag, with type "_" for a tag without one. Refuse a tag of another scheme."""
    if tag == OUTSIDE:
        return OUTSIDE, ""
    prefix, hyphen, entity_type = tag.partition("-")
    known_prefixes = "BI" if scheme == "bio" else "BIES"
    if len(prefix) != 1 or prefix not in known_prefixes or (hyphen and not entity_type):
        expected = " ".join(f"{letter}-TYPE" for letter in known_prefixes)
        raise InputError(f"{location}: '{tag}' is not one of the tags {expected} O; convert the tags, or correct it")
    return prefix, entity_type or "_"


def collect_entity_types(*sides: Iterable[Sequence[str]], scheme: EntityScheme = "lenient") -> tuple[str, ...]:
    """Return every entity type that occurs, in alphabetical order."""
    return tuple(sorted({entity.type for side in sides for tags in side for entity in get_entities(tags, scheme)}))


@dataclass(frozen=True)
class EntityF1(PrecisionRecallF1[Sequence[str], Sequence[str]]):
    """Precision, recall and F1 of entities of the types `labels`; the micro average is CoNLL's score."""

    name: ClassVar[str] = "entity_f1"
    labels: tuple[Label, ...]
    scheme: EntityScheme = "lenient"
    average: Average = "micro"

    def labels_to_count(self, hypothesis: Sequence[str], reference: Sequence[str]) -> tuple[Iterable[Label], ...]:
        predicted, gold = set(get_entities(hypothesis, self.scheme)), set(get_entities(reference, self.scheme))
        return tuple([entity.type for entity in entities] for entities in (predicted & gold, predicted, gold))

    def statistics(self, hypotheses: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Stats:
        check_sequences(hypotheses, references)
        return super().statistics(hypotheses, references)

    def signature(self, references: Sequence[Sequence[str]]) -> str:  # noqa: ARG002
        return "tags read as conlleval does" if self.scheme == "lenient" else f"strict {self.scheme.upper()}"


def _make_entity_f1(options: MetricOptions, sides: AllSides) -> EntityF1:
    return EntityF1(collect_entity_types(*sides, scheme=options.scheme), options.scheme)


ENTITY_F1 = MetricEntry("tags", _make_entity_f1, ("scheme",))
