"""SuperGLUE's JSON lines, each task as the example that its model and its metric need (Wang et al., 2019).

| task | example |
|---|---|
| BoolQ | question and passage, "true" or "false" |
| CB, RTE, AX-b, AX-g | premise and hypothesis; `group` is AX-g's pair, of which gender parity is counted |
| COPA | premise, "cause" or "effect", two options |
| MultiRC | passage and "question answer", an example an answer; `group` is the question |
| ReCoRD | query with its @placeholder, passage, entities to choose from |
| WiC | two sentences, a span in each on the word |
| WSC | a text, a span on the noun phrase and one on the pronoun |
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkv.data.examples import Answer, Choice, Labelled, Question, Span, refuse_outside
from qkv.data.readers import text_field
from qkv.data.tasks.fields import named, object_field, objects_field, whole_field
from qkv.data.tasks.lines import Bad, objects
from qkv.errors import InputError

PLACEHOLDER = "@placeholder"  # stands in ReCoRD's query where the entity is missing
_PARTS = {"train": ("train.jsonl",), "dev": ("val.jsonl", "dev.jsonl"), "test": ("test.jsonl",)}
_TRUTH = ("false", "true")
_ENTAILMENT = ("entailment", "not_entailment")
_WORDS_AWAY = 2  # WSC's published indices are up to two words off where punctuation stands apart

Record = Mapping[str, Any]
Found = Labelled | Question | Choice


def read(path: Path, bad: Bad, *, task: str) -> Iterator[Found]:
    """The examples of a file of one of the TASKS."""
    reader = TASKS[task].reader
    for where, record in objects(path, bad):
        with bad:
            found = list(reader(record, where))  # all of a passage or none: half a group would be scored wrongly
            yield from found


def _pair(first: str, second: str, labels: tuple[str, ...]) -> Callable[[Record, str], Iterator[Labelled]]:
    def reader(record: Record, where: str) -> Iterator[Labelled]:
        yield Labelled(
            text_field(record, first, where),
            where,
            text_field(record, second, where),
            _label(record, labels, where),
            id=named(record, "idx", where),
            group=named(record, "pair_id", where),
        )

    return reader


def _label(record: Record, labels: tuple[str, ...], where: str) -> str | None:
    """A name, or one of JSON's truth values or numbers; None in a test file."""
    if "label" not in record:
        return None
    value = record["label"]
    found = _TRUTH[int(value)] if value in (0, 1) and labels == _TRUTH else value
    if found not in labels:
        raise InputError(f"{where}: label {value!r} is none of {', '.join(labels)}; correct it")
    return str(found)


def _copa(record: Record, where: str) -> Iterator[Choice]:
    question = text_field(record, "question", where)
    if question not in ("cause", "effect"):
        raise InputError(f"{where}: question '{question}' is neither cause nor effect; correct it")
    right = whole_field(record, "label", where) if "label" in record else None
    if right not in (None, 0, 1):
        raise InputError(f"{where}: label {right} is neither 0 nor 1; correct it")
    options = text_field(record, "choice1", where), text_field(record, "choice2", where)
    yield Choice(text_field(record, "premise", where), options, right, where, question, named(record, "idx", where))


def _multirc(record: Record, where: str) -> Iterator[Labelled]:
    passage = object_field(record, "passage", where)
    text, index = text_field(passage, "text", where), named(record, "idx", where)
    for question in objects_field(passage, "questions", where):
        asked, group = text_field(question, "question", where), f"{index}:{named(question, 'idx', where)}"
        for answer in objects_field(question, "answers", where):
            yield Labelled(
                text,
                where,
                f"{asked} {text_field(answer, 'text', where)}",
                _label(answer, _TRUTH, where),
                id=f"{group}:{named(answer, 'idx', where)}",
                group=group,
            )


def _record(record: Record, where: str) -> Iterator[Question]:
    passage = object_field(record, "passage", where)
    text = text_field(passage, "text", where)
    candidates = tuple(_marked(entity, text, where) for entity in objects_field(passage, "entities", where))
    for asked in objects_field(record, "qas", where):
        query = text_field(asked, "query", where)
        if PLACEHOLDER not in query:
            raise InputError(f"{where}: the query has no {PLACEHOLDER}; write it where the entity is missing")
        known = "answers" in asked
        answers = (
            tuple(_marked(answer, text, where) for answer in objects_field(asked, "answers", where)) if known else ()
        )
        id = f"{named(record, 'idx', where)}:{named(asked, 'idx', where)}"
        yield Question(id, query, text, answers, where, True if known else None, candidates)


def _marked(entity: Record, text: str, where: str) -> Answer:
    start, end = whole_field(entity, "start", where), whole_field(entity, "end", where) + 1  # theirs is the last one
    refuse_outside(start, end, text, where, "entity")
    if "text" in entity and entity["text"] != text[start:end]:
        raise InputError(f"{where}: entity {entity['text']!r} is not at {start}, where {text[start:end]!r} stands")
    return Answer(text[start:end], start)


def _wic(record: Record, where: str) -> Iterator[Labelled]:
    texts = text_field(record, "sentence1", where), text_field(record, "sentence2", where)
    word = text_field(record, "word", where)
    spans = []
    for number, text in enumerate(texts, 1):
        start, end = whole_field(record, f"start{number}", where), whole_field(record, f"end{number}", where)
        refuse_outside(start, end, text, where, f"span of '{word}'")
        spans.append(Span(start, end, word, second=number == 2))
    label, id = _label(record, _TRUTH, where), named(record, "idx", where)
    yield Labelled(texts[0], where, texts[1], label, tuple(spans), id)


def _wsc(record: Record, where: str) -> Iterator[Labelled]:
    text, target = text_field(record, "text", where), object_field(record, "target", where)
    spans = []
    for name in ("span1", "span2"):
        mention, index = text_field(target, f"{name}_text", where), whole_field(target, f"{name}_index", where)
        spans.append(Span(*_near(mention, index, text, where), name))
    label, id = _label(record, _TRUTH, where), named(record, "idx", where)
    yield Labelled(text, where, None, label, tuple(spans), id)


def _near(mention: str, index: int, text: str, where: str) -> tuple[int, int]:
    """The characters of a mention that begins at the word of that index, or next to it.

    The published mentions differ from their texts in case, in line breaks and by a full stop; one lost the space after
    it, so that a whole word is only the better match.
    """
    words = mention.rstrip(".").split()
    starts = [word.start() for word in re.finditer(r"\S+", text)]
    found: list[tuple[bool, int, int, int]] = []
    for match in re.finditer(r"(?<!\w)" + r"\s+".join(map(re.escape, words)), text, re.IGNORECASE) if words else ():
        away = abs(bisect.bisect_right(starts, match.start()) - 1 - index)
        if away <= _WORDS_AWAY:
            part_of_word = text[match.end() : match.end() + 1].isalnum()
            found.append((part_of_word, away, match.start(), match.end()))
    if not found:
        raise InputError(f"{where}: '{mention}' does not stand at word {index} of its text; correct the index")
    return min(found)[2:]


@dataclass(frozen=True, slots=True)
class Task:
    """What a task's records become, and what its files are called."""

    says: str
    example: type
    reader: Callable[[Record, str], Iterator[Any]]
    files: Mapping[str, tuple[str, ...]]


def _diagnostic(name: str) -> dict[str, tuple[str, ...]]:
    return {"test": (f"{name}.jsonl", "test.jsonl")}


_THREE_WAYS = _pair("premise", "hypothesis", ("contradiction", "entailment", "neutral"))
_TWO_WAYS = _pair("premise", "hypothesis", _ENTAILMENT)
_BROAD = _pair("sentence1", "sentence2", _ENTAILMENT)
TASKS = {
    "BoolQ": Task("a yes/no question and its passage", Labelled, _pair("question", "passage", _TRUTH), _PARTS),
    "CB": Task("is the speaker committed to the clause?", Labelled, _THREE_WAYS, _PARTS),
    "COPA": Task("the likelier cause or effect", Choice, _copa, _PARTS),
    "MultiRC": Task("which answers to a question are right", Labelled, _multirc, _PARTS),
    "ReCoRD": Task("the entity that is missing in a query", Question, _record, _PARTS),
    "RTE": Task("does the premise entail the hypothesis?", Labelled, _TWO_WAYS, _PARTS),
    "WiC": Task("has a word one sense in two sentences?", Labelled, _wic, _PARTS),
    "WSC": Task("does the pronoun stand for the noun phrase?", Labelled, _wsc, _PARTS),
    "AX-b": Task("broad-coverage diagnostics of inference", Labelled, _BROAD, _diagnostic("AX-b")),
    "AX-g": Task("Winogender: inference about professions", Labelled, _TWO_WAYS, _diagnostic("AX-g")),
}
