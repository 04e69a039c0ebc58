"""Multiple choice: SWAG (Zellers et al., 2018), ARC (Clark et al., 2018), CommonsenseQA (Talmor et al., 2019), and a
person's own table of questions with options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qkv.data.examples import Choice
from qkv.data.readers import text_field
from qkv.data.tasks.fields import counted, named, object_field, objects_field, present, texts_field, whole_field
from qkv.data.tasks.lines import Bad, objects
from qkv.data.tasks.table import Row, rows
from qkv.errors import InputError

_ENDINGS = "ending0,ending1,ending2,ending3"


def swag(path: Path, bad: Bad) -> Iterator[Choice]:
    """SWAG's CSV: a sentence, the beginning of the next one, four endings; a test file has no labels."""
    yield from table(path, bad, context="sent1", second="sent2", options=_ENDINGS, answer="label", optional=True)


def table(
    path: Path,
    bad: Bad,
    *,
    context: str = "question",
    second: str | None = None,
    options: str = "choices",
    answer: str | None = "answer",
    id: str | None = None,
    form: str | None = None,
    optional: bool = False,
) -> Iterator[Choice]:
    """Choices out of a table: `options` names one JSON field with a list, or columns with commas between; `answer` is
    the number of the right one, from 0. Where it is `optional`, a table without that column has no answers."""
    names = [name.strip() for name in options.split(",")]
    needs = [name for name in (context, second, id) if name is not None] + names
    for row in rows(path, bad, needs=needs + ([answer] if answer and not optional else []), form=form):
        with bad:
            given = texts_field(row.fields, options, row.where) if len(names) == 1 else tuple(map(row.text, names))
            known = answer is not None and (not optional or answer in row.fields)
            yield Choice(
                context=row.text(context),
                options=given,
                right=_index(row, str(answer), given) if known else None,
                where=row.where,
                second=None if second is None else row.text(second),
                id=row.id(id),
            )


def _index(row: Row, name: str, options: Sequence[str]) -> int:
    value = present(row.fields, name, row.where)
    number = whole_field({name: counted(value) if isinstance(value, str) else value}, name, row.where)
    if len(options) > 1 and not 0 <= number < len(options):  # of fewer the task says what is wrong
        raise InputError(
            f"{row.where}: the answer is {number}, but the options are 0 to {len(options) - 1}; correct it"
        )
    return number


def exam(path: Path, bad: Bad) -> Iterator[Choice]:
    """ARC and CommonsenseQA as JSON lines, in any of the three forms that they go about in:

    - the official one: {"question": {"stem", "choices": [{"label", "text"}, …]}, "answerKey": "B"};
    - that of Hugging Face's hub: {"question", "choices": {"label": […], "text": […]}, "answerKey": "B"};
    - {"question", "choices": ["…", …], "answer": 1}.
    """
    for where, record in objects(path, bad, '{"question": …, "choices": […], "answer": …}'):
        with bad:
            yield _asked(record, where)


def _asked(record: Mapping[str, Any], where: str) -> Choice:
    asked = present(record, "question", where)
    id = named(record, "id", where)
    if isinstance(asked, dict):
        listed = objects_field(asked, "choices", where)
        keys = tuple(named(option, "label", where) for option in listed)
        options = tuple(text_field(option, "text", where) for option in listed)
        return Choice(text_field(asked, "stem", where), options, _key(record, keys, where), where, id=id)
    stem = text_field(record, "question", where)
    if isinstance(present(record, "choices", where), dict):
        both = object_field(record, "choices", where)
        keys, options = texts_field(both, "label", where), texts_field(both, "text", where)
        if len(keys) != len(options):
            raise InputError(f"{where}: {len(options)} choices have {len(keys)} labels; give each its own")
        return Choice(stem, options, _key(record, keys, where), where, id=id)
    options = texts_field(record, "choices", where)
    right = _index(Row(where, dict(record)), "answer", options) if "answer" in record else None
    return Choice(stem, options, right, where, id=id)


def _key(record: Mapping[str, Any], keys: Sequence[str], where: str) -> int | None:
    """The number of the option that the answer's key names; a test file has none, or an empty one."""
    key = named(record, "answerKey", where)
    if not key:
        return None
    if key not in keys:
        known = f"none of the labels {', '.join(keys)}" if keys else "there, and no choice"
        raise InputError(f"{where}: answerKey '{key}' is {known}; correct it")
    return keys.index(key)
