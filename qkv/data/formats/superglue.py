"""Reader of SuperGLUE's JSON lines (Wang et al., 2019); the kind of example depends on the task.

| task | example |
|---|---|
| BoolQ | question and passage, "true" or "false" |
| CB, RTE, AX-b, AX-g | premise and hypothesis; `group` is AX-g's pair, for the gender parity score |
| COPA | premise, "cause" or "effect", two choices |
| MultiRC | passage and "question answer", one example per answer; `group` is the question |
| ReCoRD | query with an @placeholder, passage, candidate entities |
| WiC | two sentences with a span in each |
| WSC | a text with a span for the noun phrase and one for the pronoun |
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkv.data.examples import Answer, MultipleChoiceExample, QAExample, Span, TextExample, check_span
from qkv.data.formats.fields import id_field, int_field, object_field, objects_field, string_field
from qkv.data.formats.io import ErrorPolicy, json_records
from qkv.errors import InputError, quote

PLACEHOLDER = "@placeholder"  # the missing entity in a query of ReCoRD
_SPLIT_FILES = {"train": ("train.jsonl",), "dev": ("val.jsonl", "dev.jsonl"), "test": ("test.jsonl",)}
_BOOL_LABELS = ("false", "true")
_ENTAILMENT = ("entailment", "not_entailment")
_MAX_WORD_DISTANCE = 2  # WSC's published indices are off by up to two words where punctuation is a token of its own

Record = Mapping[str, Any]
SuperGlueExample = TextExample | QAExample | MultipleChoiceExample


def read(path: Path, error_policy: ErrorPolicy, *, task: str) -> Iterator[SuperGlueExample]:
    """Read a file of one of the TASKS."""
    reader = TASKS[task].reader
    for location, record in json_records(path, error_policy):
        with error_policy:
            examples = list(reader(record, location))  # all examples of a record or none: metrics need complete groups
            yield from examples


def _pair_reader(
    text_key: str, text_pair_key: str, labels: tuple[str, ...]
) -> Callable[[Record, str], Iterator[TextExample]]:
    def read_example(record: Record, location: str) -> Iterator[TextExample]:
        yield TextExample(
            string_field(record, text_key, location),
            location,
            string_field(record, text_pair_key, location),
            _parse_label(record, labels, location),
            id=id_field(record, "idx", location),
            group=id_field(record, "pair_id", location),
        )

    return read_example


def _parse_label(record: Record, labels: tuple[str, ...], location: str) -> str | None:
    """Return the label, given as a name, a boolean or a number; None in a test file."""
    if "label" not in record:
        return None
    value = record["label"]
    label = _BOOL_LABELS[int(value)] if value in (0, 1) and labels == _BOOL_LABELS else value
    if label not in labels:
        raise InputError(f"{location}: label {quote(value)} is not one of {', '.join(labels)}; correct it")
    return str(label)


def _read_copa(record: Record, location: str) -> Iterator[MultipleChoiceExample]:
    question = string_field(record, "question", location)
    if question not in ("cause", "effect"):
        raise InputError(f"{location}: question {quote(question)} is neither cause nor effect; correct it")
    label = int_field(record, "label", location) if "label" in record else None
    if label not in (None, 0, 1):
        raise InputError(f"{location}: label {label} is neither 0 nor 1; correct it")
    premise, id = string_field(record, "premise", location), id_field(record, "idx", location)
    choices = string_field(record, "choice1", location), string_field(record, "choice2", location)
    yield MultipleChoiceExample(premise, choices, label, location, question, id)


def _read_multirc(record: Record, location: str) -> Iterator[TextExample]:
    passage = object_field(record, "passage", location)
    text, index = string_field(passage, "text", location), id_field(record, "idx", location)
    for question in objects_field(passage, "questions", location):
        question_text = string_field(question, "question", location)
        group = f"{index}:{id_field(question, 'idx', location)}"
        for answer in objects_field(question, "answers", location):
            yield TextExample(
                text,
                location,
                f"{question_text} {string_field(answer, 'text', location)}",
                _parse_label(answer, _BOOL_LABELS, location),
                id=f"{group}:{id_field(answer, 'idx', location)}",
                group=group,
            )


def _read_record(record: Record, location: str) -> Iterator[QAExample]:
    passage = object_field(record, "passage", location)
    text = string_field(passage, "text", location)
    entities = objects_field(passage, "entities", location)
    candidates = tuple(_entity_answer(entity, text, location) for entity in entities)
    for qa in objects_field(record, "qas", location):
        query = string_field(qa, "query", location)
        if PLACEHOLDER not in query:
            raise InputError(f"{location}: the query has no {PLACEHOLDER}; write it where the entity is missing")
        has_answers = "answers" in qa
        raw_answers = objects_field(qa, "answers", location) if has_answers else []
        answers = tuple(_entity_answer(answer, text, location) for answer in raw_answers)
        id = f"{id_field(record, 'idx', location)}:{id_field(qa, 'idx', location)}"
        yield QAExample(id, query, text, answers, location, True if has_answers else None, candidates)


def _entity_answer(entity: Record, text: str, location: str) -> Answer:
    start, end = (
        int_field(entity, "start", location),
        int_field(entity, "end", location) + 1,
    )  # in the file, the last character
    check_span(start, end, text, location, "entity")
    if "text" in entity and entity["text"] != text[start:end]:
        raise InputError(
            f"{location}: entity {quote(entity['text'])} is not at {start}; the text has {quote(text[start:end])} there"
        )
    return Answer(text[start:end], start)


def _read_wic(record: Record, location: str) -> Iterator[TextExample]:
    texts = string_field(record, "sentence1", location), string_field(record, "sentence2", location)
    word = string_field(record, "word", location)
    spans = []
    for number, text in enumerate(texts, 1):
        start, end = int_field(record, f"start{number}", location), int_field(record, f"end{number}", location)
        check_span(start, end, text, location, f"span of {quote(word)}")
        spans.append(Span(start, end, word, in_text_pair=number == 2))
    label, id = _parse_label(record, _BOOL_LABELS, location), id_field(record, "idx", location)
    yield TextExample(texts[0], location, texts[1], label, tuple(spans), id)


def _read_wsc(record: Record, location: str) -> Iterator[TextExample]:
    text, target = string_field(record, "text", location), object_field(record, "target", location)
    spans = []
    for name in ("span1", "span2"):
        mention, index = string_field(target, f"{name}_text", location), int_field(target, f"{name}_index", location)
        spans.append(Span(*_find_mention(mention, index, text, location), name))
    label, id = _parse_label(record, _BOOL_LABELS, location), id_field(record, "idx", location)
    yield TextExample(text, location, None, label, tuple(spans), id)


def _find_mention(mention: str, index: int, text: str, location: str) -> tuple[int, int]:
    """Return the characters of a mention that begins at the word of the given index, or near it.

    The published mentions differ from their texts in case, line breaks and a final full stop. One has no space after
    it, so a match that ends inside a word is accepted if there is no better one.
    """
    words = mention.rstrip(".").split()
    starts = [word.start() for word in re.finditer(r"\S+", text)]
    candidates: list[tuple[bool, int, int, int]] = []
    for match in re.finditer(r"(?<!\w)" + r"\s+".join(map(re.escape, words)), text, re.IGNORECASE) if words else ():
        distance = abs(bisect.bisect_right(starts, match.start()) - 1 - index)
        if distance <= _MAX_WORD_DISTANCE:
            is_word_prefix = text[match.end() : match.end() + 1].isalnum()
            candidates.append((is_word_prefix, distance, match.start(), match.end()))
    if not candidates:
        raise InputError(f"{location}: {quote(mention)} is not at word {index} of its text; correct the index")
    return min(candidates)[2:]


@dataclass(frozen=True, slots=True)
class SuperGlueTask:
    """Reader and file names of a task."""

    description: str
    example_type: type
    reader: Callable[[Record, str], Iterator[Any]]
    files: Mapping[str, tuple[str, ...]]


def _diagnostic_files(name: str) -> dict[str, tuple[str, ...]]:
    return {"test": (f"{name}.jsonl", "test.jsonl")}


_READ_BOOLQ = _pair_reader("question", "passage", _BOOL_LABELS)
_READ_CB = _pair_reader("premise", "hypothesis", ("contradiction", "entailment", "neutral"))
_READ_NLI = _pair_reader("premise", "hypothesis", _ENTAILMENT)
_READ_AX_B = _pair_reader("sentence1", "sentence2", _ENTAILMENT)
TASKS = {
    "BoolQ": SuperGlueTask("a yes/no question and its passage", TextExample, _READ_BOOLQ, _SPLIT_FILES),
    "CB": SuperGlueTask("is the speaker committed to the clause?", TextExample, _READ_CB, _SPLIT_FILES),
    "COPA": SuperGlueTask("the likelier cause or effect", MultipleChoiceExample, _read_copa, _SPLIT_FILES),
    "MultiRC": SuperGlueTask("which answers to a question are correct", TextExample, _read_multirc, _SPLIT_FILES),
    "ReCoRD": SuperGlueTask("the entity that is missing in a query", QAExample, _read_record, _SPLIT_FILES),
    "RTE": SuperGlueTask("does the premise entail the hypothesis?", TextExample, _READ_NLI, _SPLIT_FILES),
    "WiC": SuperGlueTask("does a word have the same sense in two sentences?", TextExample, _read_wic, _SPLIT_FILES),
    "WSC": SuperGlueTask("does the pronoun refer to the noun phrase?", TextExample, _read_wsc, _SPLIT_FILES),
    "AX-b": SuperGlueTask(
        "broad-coverage diagnostics of inference", TextExample, _READ_AX_B, _diagnostic_files("AX-b")
    ),
    "AX-g": SuperGlueTask("Winogender: inference about professions", TextExample, _READ_NLI, _diagnostic_files("AX-g")),
}
