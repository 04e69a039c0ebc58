"""A person's own table: CSV, TSV or JSON lines with named columns, read with no code.

table.read("mine.csv", text="review", label="stars")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkv.data.examples import Examples, Kind, Label, Labelled
from qkv.data.readers import text_field
from qkv.data.tasks.fields import named, present
from qkv.data.tasks.lines import Bad, comma_records, ending, objects, tab_records
from qkv.errors import InputError, in_one_line, nearest

ENDINGS = {".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".txt": "tsv"}
ENDINGS |= {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}
FORMS = ("csv", "tsv", "jsonl")


@dataclass(frozen=True, slots=True)
class Row:
    """A record of a table: its place, and its fields by the names of their columns."""

    where: str
    fields: dict[str, Any]
    columns: Sequence[str] = ()  # of the whole table; JSON lines have none

    def text(self, name: str) -> str:
        """A field that is a string of something; numbers of a JSON file are not taken for text."""
        text = text_field(self.fields, name, self.where)
        if not text.strip():
            raise InputError(f"{self.where}: the column '{name}' is empty here; fill it in or remove the record")
        return text

    def id(self, name: str | None) -> str:
        """A field that names the record; "" if there is no such column."""
        return "" if name is None else named({name: present(self.fields, name, self.where)}, name, self.where)


def read(path: str | Path, *, skip_bad: bool = False, **options: Any) -> Examples[Labelled]:
    """All examples of a table. The options are those of `labelled`."""
    return collect(labelled, Path(path), skip_bad, **options)


def collect(reader: Callable[..., Iterator[Kind]], path: Path, skip_bad: bool, **options: Any) -> Examples[Kind]:
    """What a reader finds in a file, which has to be something."""
    bad = Bad(skip_bad)
    try:
        examples = Examples(reader(path, bad, **options))
    except InputError as error:
        raise InputError(in_one_line(error)) from None
    examples.skipped = bad.reasons
    if not examples and bad.reasons:
        records = "a bad record" if len(bad.reasons) == 1 else f"{len(bad.reasons)} bad records, the first"
        raise InputError(f"{path}: nothing is left but {records}: {bad.reasons[0]}")
    if not examples:
        raise InputError(f"{path}: empty, no examples in it; give a file with at least one")
    return examples


def labelled(
    path: Path,
    bad: Bad,
    *,
    text: str = "text",
    label: str | None = "label",
    second: str | None = None,
    id: str | None = None,
    group: str | None = None,
    form: str | None = None,
    header: bool = True,
    number: bool = False,
    separator: str | None = None,
) -> Iterator[Labelled]:
    """Texts, or pairs of texts, with their labels from the columns of those names; `label=None` reads none.

    A `number` is a label to be regressed. With a `separator` an example has any number of labels, as it has where a
    JSON field is a list. Without a `header` the columns are called "1", "2", …. Examples of one `group` can be held out
    together. `form` is one of the FORMS where the file's name does not tell.
    """
    needs = [name for name in (text, second, label, id, group) if name is not None]
    for row in rows(path, bad, needs=needs, form=form, header=header):
        with bad:
            yield Labelled(
                text=row.text(text),
                where=row.where,
                second=None if second is None else row.text(second),
                label=None if label is None else label_of(row, label, number, separator),
                id=row.id(id),
                group=row.id(group),
            )


def label_of(row: Row, name: str, number: bool = False, separator: str | None = None) -> Label:
    """A field as a label; JSON's numbers and truth values get the names that a CSV file would give them."""
    value = present(row.fields, name, row.where)
    if number:
        return number_of(value, row.where, name)
    if isinstance(value, list):
        return tuple(_class(one, name, row.where) for one in value)
    if separator is not None and isinstance(value, str):
        return tuple(one.strip() for one in value.split(separator) if one.strip())
    return _class(value, name, row.where)


def number_of(value: Any, where: str, name: str) -> float:
    """A number that can be regressed."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise InputError(f"{where}: the column '{name}' holds {value!r}, which is no number; correct it")
    return found


def _class(value: Any, name: str, where: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float) and not math.isnan(value):  # what a table without a value there becomes in JSON
        return str(value)
    label = "" if value is None or isinstance(value, float) else text_field({name: value}, name, where).strip()
    if not label:
        raise InputError(f"{where}: the label '{name}' is empty; fill it in or remove the record")
    return label


def rows(
    path: Path,
    bad: Bad,
    *,
    needs: Iterable[str] = (),
    form: str | None = None,
    header: bool = True,
    ragged: bool = False,
) -> Iterator[Row]:
    """The records of a table that has the columns that it `needs`.

    In a `ragged` one a record may be shorter or longer than the header: then it lacks fields, or loses the last.
    """
    form = form or _told(path)
    if form not in FORMS:
        raise InputError(f"{path}: the form '{form}' of a table is unknown; {nearest(form, FORMS)}")
    if form == "jsonl":
        yield from (Row(where, record) for where, record in objects(path, bad))
        return
    columns: list[str] | None = None
    before = len(bad.reasons)
    for where, fields in (comma_records if form == "csv" else tab_records)(path, bad):
        if columns is None:
            if header and len(bad.reasons) > before:  # it was the header that was skipped
                raise InputError(bad.reasons[before])
            columns = _columns(fields, where, needs, header)
            if header:
                continue
        with bad:
            if len(fields) != len(columns) and not ragged:
                raise misfit(where, fields, columns)
            yield Row(where, dict(zip(columns, fields, strict=False)), columns)


def misfit(where: str, fields: Sequence[str], columns: Sequence[str]) -> InputError:
    """A record that has too few fields, or too many."""
    found = f"{len(fields)} field{'s' if len(fields) > 1 else ''}"
    return InputError(f"{where}: {found} where the table has {len(columns)} columns; repair the record")


def missing(where: str, name: str, columns: Iterable[str]) -> InputError:
    """A column that is not there; where the whole line was taken for one column, what it seems to be written in."""
    known = list(columns)
    if known and known[0].startswith("{"):
        return InputError(f"{where}: no column '{name}', but JSON; give the format jsonl")
    between = next((sign for sign in (";", "\t", "|", ",") if len(known) == 1 and sign in known[0]), None)
    if between is not None:
        told = "tabs" if between == "\t" else f"'{between}'"
        remedy = {"\t": "give the format tsv", ",": "give the format csv"}.get(between, "convert it")
        return InputError(f"{where}: no column '{name}'; it has {told} where csv has commas and tsv tabs; {remedy}")
    return InputError(f"{where}: no column '{name}'; the columns are: {', '.join(known)}")


def _columns(fields: list[str], where: str, needs: Iterable[str], header: bool) -> list[str]:
    columns = [name.strip() for name in fields] if header else [str(number + 1) for number in range(len(fields))]
    for name in needs:
        if name not in columns:
            raise missing(where, name, columns)
        if columns.count(name) > 1:
            raise InputError(f"{where}: {columns.count(name)} columns are called '{name}'; rename all but one")
    return columns


def _told(path: Path) -> str:
    form = ENDINGS.get(ending(path))
    if form is None:
        raise InputError(f"{path}: its name does not tell its form; end it in {', '.join(ENDINGS)} or name the form")
    return form
