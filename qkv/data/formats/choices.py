"""Readers of multiple choice: tables, SWAG (Zellers et al., 2018), ARC (Clark et al., 2018) and CommonsenseQA (Talmor
et al., 2019)."""

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
from qkv.data.formats.rows import Source
from qkv.data.formats.table import read_rows, split_names
from qkv.data.formats.text_table import Row
from qkv.errors import InputError, quote

_ENDING_COLUMNS = "ending0,ending1,ending2,ending3"


def read_swag(path: Path, error_policy: ErrorPolicy) -> Iterator[MultipleChoiceExample]:
    """Read SWAG's CSV: a sentence, the beginning of the next one, and four endings; a test file has no labels."""
    columns: dict[str, Any] = {"context": "sent1", "text_pair": "sent2", "choices": _ENDING_COLUMNS, "answer": "label"}
    yield from read_table(path, error_policy, answer_optional=True, **columns)


def read_table(
    source: Source,
    error_policy: ErrorPolicy,
    *,
    context: str = "question",
    text_pair: str | None = None,
    choices: Sequence[str] | str = "choices",
    answer: str | None = "answer",
    id: str | None = None,
    file_type: str | None = None,
    header: bool = True,
    delimiter: str | None = None,
    encoding: str | None = None,
    answer_optional: bool = False,
) -> Iterator[MultipleChoiceExample]:
    """Read questions with choices from a table.

    Args:
        source: the table.
        error_policy: handles bad records.
        context: column of the question or context.
        text_pair: column of a second text between the context and each choice.
        choices: one field with a list (JSON, Parquet), or several columns, as a list or separated by commas.
        answer: column with the index of the correct choice, from 0; None reads no answers.
        id: column of the example's id.
        file_type: "csv", "tsv" or "jsonl", if the file name does not tell.
        header: whether the first line has the names of the columns; without it they are "1", "2", ….
        delimiter: character between the fields; None: detected.
        encoding: encoding of the file; None: detected.
        answer_optional: accept a table without the column `answer`, as unlabeled examples.
    """
    names = split_names(choices)
    required = [name for name in (context, text_pair, id) if name is not None] + names
    if answer and not answer_optional:
        required.append(answer)
    options: dict[str, Any] = {"file_type": file_type, "header": header, "delimiter": delimiter, "encoding": encoding}
    optional = [answer] if answer and answer_optional else []
    for row in read_rows(source, error_policy, required=required, optional=optional, **options):
        with error_policy:
            if len(names) == 1:
                choice_texts = strings_field(row.fields, names[0], row.location)
            else:
                choice_texts = tuple(row.text(name) for name in names)
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
    if len(choices) > 1 and not 0 <= index < len(choices):  # the task refuses fewer than two choices
        raise InputError(
            f"{row.location}: the answer is {index}, but the choices are 0 to {len(choices) - 1}; correct it"
        )
    return index


def read_arc(path: Source, error_policy: ErrorPolicy) -> Iterator[MultipleChoiceExample]:
    """Read ARC and CommonsenseQA as JSON lines, in any of three published forms.

    - official: {"question": {"stem", "choices": [{"label", "text"}, …]}, "answerKey": "B"};
    - Hugging Face Hub: {"question", "choices": {"label": […], "text": […]}, "answerKey": "B"};
    - plain: {"question", "choices": ["…", …], "answer": 1}.
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
        stem = string_field(question, "stem", location)
        return MultipleChoiceExample(stem, choices, _answer_index(record, keys, location), location, id=id)
    stem = string_field(record, "question", location)
    if isinstance(require_field(record, "choices", location), dict):
        choice_lists = object_field(record, "choices", location)
        keys, choices = strings_field(choice_lists, "label", location), strings_field(choice_lists, "text", location)
        if len(keys) != len(choices):
            raise InputError(f"{location}: {len(choices)} choices have {len(keys)} labels; give one label per choice")
        return MultipleChoiceExample(stem, choices, _answer_index(record, keys, location), location, id=id)
    choices = strings_field(record, "choices", location)
    label = _parse_answer(Row(location, dict(record)), "answer", choices) if "answer" in record else None
    return MultipleChoiceExample(stem, choices, label, location, id=id)


def _answer_index(record: Mapping[str, Any], keys: Sequence[str], location: str) -> int | None:
    """Return the index of the choice with the answer's key; None if the key is missing or empty, as in a test file."""
    key = id_field(record, "answerKey", location)
    if not key:
        return None
    if key not in keys:
        problem = f"is not one of the labels {', '.join(keys)}" if keys else "is given, but there are no choices"
        raise InputError(f"{location}: answerKey {quote(key)} {problem}; correct it")
    return keys.index(key)
