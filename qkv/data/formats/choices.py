"""Multiple choice: SWAG (Zellers et al., 2018), ARC (Clark et al., 2018), CommonsenseQA (Talmor et al., 2019), and a
person's own table of questions with options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qkv.data.examples import MultipleChoiceExample
from qkv.data.formats.fields import (
    id_field,
    int_field,
    object_field,
    objects_field,
    parse_count,
    require_field,
    string_field,
    strings_field,
)
from qkv.data.formats.io import ErrorPolicy, json_records
from qkv.data.formats.table import Row, read_rows
from qkv.errors import InputError

_ENDING_COLUMNS = "ending0,ending1,ending2,ending3"


def read_swag(path: Path, error_policy: ErrorPolicy) -> Iterator[MultipleChoiceExample]:
    """SWAG's CSV: a sentence, the beginning of the next one, four endings; a test file has no labels."""
    yield from read_table(path, error_policy, context="sent1", text_pair="sent2", choices=_ENDING_COLUMNS, answer="label", answer_optional=True)


def read_table(
    path: Path,
    error_policy: ErrorPolicy,
    *,
    context: str = "question",
    text_pair: str | None = None,
    choices: str = "choices",
    answer: str | None = "answer",
    id: str | None = None,
    file_type: str | None = None,
    answer_optional: bool = False,
) -> Iterator[MultipleChoiceExample]:
    """Choices out of a table: `choices` names one JSON field with a list, or columns with commas between; `answer` is
    the number of the right one, from 0. Where it is `answer_optional`, a table without that column has no answers."""
    names = [name.strip() for name in choices.split(",")]
    required = [name for name in (context, text_pair, id) if name is not None] + names
    for row in read_rows(path, error_policy, required=required + ([answer] if answer and not answer_optional else []), file_type=file_type):
        with error_policy:
            choice_texts = strings_field(row.fields, choices, row.location) if len(names) == 1 else tuple(map(row.text, names))
            has_label = answer is not None and (not answer_optional or answer in row.fields)
            yield MultipleChoiceExample(
                context=row.text(context),
                choices=choice_texts,
                label=_parse_answer(row, str(answer), choice_texts) if has_label else None,
                location=row.location,
                text_pair=None if text_pair is None else row.text(text_pair),
                id=row.id(id),
            )


def _parse_answer(row: Row, name: str, choices: Sequence[str]) -> int:
    value = require_field(row.fields, name, row.location)
    index = int_field({name: parse_count(value) if isinstance(value, str) else value}, name, row.location)
    if len(choices) > 1 and not 0 <= index < len(choices):  # of fewer the task says what is wrong
        raise InputError(
            f"{row.location}: the answer is {index}, but the options are 0 to {len(choices) - 1}; correct it"
        )
    return index


def read_arc(path: Path, error_policy: ErrorPolicy) -> Iterator[MultipleChoiceExample]:
    """ARC and CommonsenseQA as JSON lines, in any of the three forms that they go about in:

    - the official one: {"question": {"stem", "choices": [{"label", "text"}, …]}, "answerKey": "B"};
    - that of Hugging Face's hub: {"question", "choices": {"label": […], "text": […]}, "answerKey": "B"};
    - {"question", "choices": ["…", …], "answer": 1}.
    """
    for location, record in json_records(path, error_policy, '{"question": …, "choices": […], "answer": …}'):
        with error_policy:
            yield _parse_question(record, location)


def _parse_question(record: Mapping[str, Any], location: str) -> MultipleChoiceExample:
    question = require_field(record, "question", location)
    id = id_field(record, "id", location)
    if isinstance(question, dict):
        choice_objects = objects_field(question, "choices", location)
        keys = tuple(id_field(option, "label", location) for option in choice_objects)
        choices = tuple(string_field(option, "text", location) for option in choice_objects)
        return MultipleChoiceExample(string_field(question, "stem", location), choices, _answer_index(record, keys, location), location, id=id)
    stem = string_field(record, "question", location)
    if isinstance(require_field(record, "choices", location), dict):
        choice_lists = object_field(record, "choices", location)
        keys, choices = strings_field(choice_lists, "label", location), strings_field(choice_lists, "text", location)
        if len(keys) != len(choices):
            raise InputError(f"{location}: {len(choices)} choices have {len(keys)} labels; give each its own")
        return MultipleChoiceExample(stem, choices, _answer_index(record, keys, location), location, id=id)
    choices = strings_field(record, "choices", location)
    label = _parse_answer(Row(location, dict(record)), "answer", choices) if "answer" in record else None
    return MultipleChoiceExample(stem, choices, label, location, id=id)


def _answer_index(record: Mapping[str, Any], keys: Sequence[str], location: str) -> int | None:
    """The number of the option that the answer's key names; a test file has none, or an empty one."""
    key = id_field(record, "answerKey", location)
    if not key:
        return None
    if key not in keys:
        known = f"none of the labels {', '.join(keys)}" if keys else "there, and no choice"
        raise InputError(f"{location}: answerKey '{key}' is {known}; correct it")
    return keys.index(key)
