"""SQuAD 1.1 and 2.0 (Rajpurkar et al., 2016, 2018), one JSON file of articles, paragraphs and questions; and the same
questions flat, one a record of JSON lines.

An answer has to stand in its context at the offset that it names: a model trained on offsets that are off by a few
characters learns to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qkv.data.examples import Answer, Question, refuse_outside
from qkv.data.readers import text_field
from qkv.data.tasks.fields import named, object_field, objects_field, present, texts_field, whole_field
from qkv.data.tasks.lines import Bad, document, objects
from qkv.errors import InputError


def read(path: Path, bad: Bad) -> Iterator[Question]:
    """The questions of a SQuAD file; those of 2.0 that are marked impossible are not answerable."""
    whole = document(path)
    if not isinstance(whole, dict) or "data" not in whole:
        raise InputError(f'{path}: not a SQuAD file; write {{"data": [{{"paragraphs": […]}}, …]}}')
    for number, article in enumerate(objects_field(whole, "data", str(path)), 1):
        where = f"{path}: article {number}"
        with bad:
            title = named(article, "title", where)
            for place, paragraph in enumerate(objects_field(article, "paragraphs", where), 1):
                with bad:
                    yield from _paragraph(paragraph, title, f"{where}, paragraph {place}", path, bad)


def _paragraph(paragraph: Mapping[str, Any], title: str, where: str, path: Path, bad: Bad) -> Iterator[Question]:
    context = text_field(paragraph, "context", where)
    for asked in objects_field(paragraph, "qas", where):
        with bad:
            yield replace(_question(asked, context, path), title=title)


def _question(asked: Mapping[str, Any], context: str, path: Path) -> Question:
    id = named(asked, "id", str(path))
    if not id:
        raise InputError(f"{path}: a question without an id, {asked.get('question')!r}; give it one")
    where = f"{path}: question {id}"
    question = text_field(asked, "question", where)
    if "answers" not in asked:
        return Question(id, question, context, (), where, None)
    impossible = asked.get("is_impossible", False)
    if not isinstance(impossible, bool):
        raise InputError(f"{where}: is_impossible is {impossible!r}; it is true or false")
    found = [
        _answer(text_field(answer, "text", where), whole_field(answer, "answer_start", where), context, where)
        for answer in objects_field(asked, "answers", where)
    ]
    if impossible == bool(found):
        said = "has answers and is marked impossible" if found else "has no answer and is not marked impossible"
        raise InputError(f"{where}: the question {said}; correct one of the two")
    return Question(id, question, context, tuple(found), where, not impossible)


def _answer(text: str, start: int, context: str, where: str) -> Answer:
    refuse_outside(start, start + len(text), context, where, "answer")
    if not text.strip():
        raise InputError(f"{where}: the answer at character {start} is white space only; correct it")
    if context.startswith(text, start):
        return Answer(text, start)
    places = [place for place in range(len(context)) if context.startswith(text, place)]
    hint = (
        f"the nearest is at {min(places, key=lambda p: abs(p - start))}" if places else "it is nowhere in the context"
    )
    raise InputError(f"{where}: the answer {text!r} does not stand at character {start}; {hint}")


def flat(
    path: Path,
    bad: Bad,
    *,
    question: str = "question",
    context: str = "context",
    answers: str | None = "answers",
    id: str = "id",
) -> Iterator[Question]:
    """Questions one a record: `answers` holds a list of {"text", "answer_start"}, or an object of the two lists; an
    empty one says that the context has no answer."""
    for where, record in objects(path, bad, f'{{"{question}": …, "{context}": …}}'):
        with bad:
            asked, told = text_field(record, question, where), text_field(record, context, where)
            found = () if answers is None else tuple(_flat_answers(record, answers, told, where))
            answerable = None if answers is None else bool(found)
            name = named(record, id, where) or where.rpartition(":")[2].strip()
            yield Question(name, asked, told, found, where, answerable)


def _flat_answers(record: Mapping[str, Any], name: str, context: str, where: str) -> Iterator[Answer]:
    if isinstance(present(record, name, where), list):
        for answer in objects_field(record, name, where):
            start = whole_field(answer, "answer_start", where)
            yield _answer(text_field(answer, "text", where), start, context, where)
        return
    listed = object_field(record, name, where)
    texts, starts = texts_field(listed, "text", where), present(listed, "answer_start", where)
    if not isinstance(starts, list) or len(starts) != len(texts):
        raise InputError(f"{where}: '{name}' has {len(texts)} texts and not as many offsets in 'answer_start'")
    for text, start in zip(texts, starts, strict=True):
        yield _answer(text, whole_field({"answer_start": start}, "answer_start", where), context, where)
