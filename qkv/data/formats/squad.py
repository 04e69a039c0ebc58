"""Readers of questions: SQuAD 1.1 and 2.0 (Rajpurkar et al., 2016, 2018), and JSON lines with one question each.

The text of an answer must occur in its context at the given offset; otherwise a model would be trained on wrong spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qkv.data.examples import Answer, QAExample, check_span
from qkv.data.formats.fields import (
    id_field,
    int_field,
    object_field,
    objects_field,
    require_field,
    string_field,
    strings_field,
)
from qkv.data.formats.io import ErrorPolicy, json_records, read_json
from qkv.data.formats.rows import Source
from qkv.errors import InputError, describe_value, quote


def read(path: Path, error_policy: ErrorPolicy) -> Iterator[QAExample]:
    """Read a SQuAD file; questions of version 2.0 that are marked impossible have no answer."""
    data = read_json(path)
    if not isinstance(data, dict) or "data" not in data:
        raise InputError(f'{path}: not a SQuAD file; write {{"data": [{{"paragraphs": […]}}, …]}}')
    for number, article in enumerate(objects_field(data, "data", str(path)), 1):
        location = f"{path}: article {number}"
        with error_policy:
            title = id_field(article, "title", location)
            for paragraph_number, paragraph in enumerate(objects_field(article, "paragraphs", location), 1):
                paragraph_location = f"{location}, paragraph {paragraph_number}"
                with error_policy:
                    yield from _read_paragraph(paragraph, title, paragraph_location, path, error_policy)


def _read_paragraph(
    paragraph: Mapping[str, Any], title: str, location: str, path: Path, error_policy: ErrorPolicy
) -> Iterator[QAExample]:
    context = string_field(paragraph, "context", location)
    for qa in objects_field(paragraph, "qas", location):
        with error_policy:
            yield replace(_parse_question(qa, context, path), title=title)


def _parse_question(qa: Mapping[str, Any], context: str, path: Path) -> QAExample:
    id = id_field(qa, "id", str(path))
    if not id:
        raise InputError(f"{path}: a question without an id, {quote(qa.get('question'))}; give it one")
    location = f"{path}: question {quote(id)[1:-1]}"
    question = string_field(qa, "question", location)
    if "answers" not in qa:
        return QAExample(id, question, context, (), location, None)
    is_impossible = qa.get("is_impossible", False)
    if not isinstance(is_impossible, bool):
        raise InputError(f"{location}: is_impossible is {describe_value(is_impossible)}; write true or false")
    answers = [
        _make_answer(
            string_field(answer, "text", location), int_field(answer, "answer_start", location), context, location
        )
        for answer in objects_field(qa, "answers", location)
    ]
    if is_impossible == bool(answers):
        problem = "has answers and is marked impossible" if answers else "has no answer and is not marked impossible"
        raise InputError(f"{location}: the question {problem}; correct one of the two")
    return QAExample(id, question, context, tuple(answers), location, not is_impossible)


def _make_answer(text: str, start: int, context: str, location: str) -> Answer:
    check_span(start, start + len(text), context, location, "answer")
    if not text.strip():
        raise InputError(f"{location}: the answer at character {start} is white space only; correct it")
    if context.startswith(text, start):
        return Answer(text, start)
    offsets = [offset for offset in range(len(context)) if context.startswith(text, offset)]
    hint = (
        f"the nearest is at {min(offsets, key=lambda p: abs(p - start))}" if offsets else "it is nowhere in the context"
    )
    raise InputError(f"{location}: the answer {quote(text)} is not at character {start} of its context; {hint}")


def read_jsonl(
    path: Source,
    error_policy: ErrorPolicy,
    *,
    question: str = "question",
    context: str = "context",
    answers: str | None = "answers",
    id: str = "id",
    encoding: str | None = None,
) -> Iterator[QAExample]:
    """Read one question per JSON line.

    `answers` is the field with a list of {"text", "answer_start"}, or with an object of two such lists. An empty list
    marks a question without an answer; `answers=None` reads none.
    """
    expected = f'{{"{question}": …, "{context}": …}}'
    for location, record in json_records(path, error_policy, expected, encoding):
        with error_policy:
            question_text = string_field(record, question, location)
            context_text = string_field(record, context, location)
            answer_tuple = () if answers is None else tuple(_parse_answers(record, answers, context_text, location))
            answerable = None if answers is None else bool(answer_tuple)
            question_id = id_field(record, id, location) or location.rpartition(":")[2].strip().removeprefix("row ")
            yield QAExample(question_id, question_text, context_text, answer_tuple, location, answerable)


def _parse_answers(record: Mapping[str, Any], name: str, context: str, location: str) -> Iterator[Answer]:
    if isinstance(require_field(record, name, location), list):
        for answer in objects_field(record, name, location):
            start = int_field(answer, "answer_start", location)
            yield _make_answer(string_field(answer, "text", location), start, context, location)
        return
    answer_lists = object_field(record, name, location)
    texts, starts = strings_field(answer_lists, "text", location), require_field(answer_lists, "answer_start", location)
    if not isinstance(starts, list) or len(starts) != len(texts):
        raise InputError(f"{location}: '{name}' has {len(texts)} texts but not as many offsets in 'answer_start'")
    for text, start in zip(texts, starts, strict=True):
        yield _make_answer(text, int_field({"answer_start": start}, "answer_start", location), context, location)
