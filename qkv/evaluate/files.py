"""Hypotheses and references out of files from anywhere: what `qkv score` reads, one function a kind of file.

Files are UTF-8, plain or packed (.gz, .zst); a file that cannot be scored is one line that names it and its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qkv.data.tasks import conll
from qkv.data.tasks.fields import named, objects_field
from qkv.data.tasks.lines import Bad, comma_records, document, ending, lines
from qkv.errors import InputError, nearest
from qkv.evaluate.entities import Scheme, tag_parts

Kind = Literal["texts", "labels", "label_sets", "numbers", "tags", "answers"]


@dataclass(frozen=True)
class Sides:
    """What is scored: one hypothesis an example, its reference, and what another system made of it."""

    hypotheses: Sequence[Any]
    references: Sequence[Any]
    other: Sequence[Any] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Files:
    """Which files, and which of their columns: a name from the first line, or a number from 1; of CoNLL-U upos, …."""

    hypotheses: Path
    references: tuple[Path, ...]
    other: Path | None = None
    hypothesis_column: str | None = None
    reference_column: str | None = None
    separator: str = ","  # between the labels of one example
    scheme: Scheme | None = None  # of tags that must be those of entities


def read_sides(kind: Kind, files: Files) -> Sides:
    """All sides, as long as each other."""
    if len(files.references) > 1 and kind != "texts":
        raise InputError(f"{len(files.references)} files of references: only texts may have several; give one --ref")
    if kind == "answers":
        return _answers(files)
    if kind == "tags":
        return _tags(files)
    hypotheses = _column(files.hypotheses, files.hypothesis_column, "--hyp-column")
    references = [_column(path, files.reference_column, "--ref-column") for path in files.references]
    other = None if files.other is None else _column(files.other, files.hypothesis_column, "--hyp-column")
    read = {"texts": _text, "labels": _label, "numbers": _number, "label_sets": _label_set(files.separator)}[kind]
    said, *right = [[read(*cell) for cell in cells] for cells in (hypotheses, *references)]
    others = None if other is None else [read(*cell) for cell in other]
    for path, side in [*zip(files.references, right, strict=True), (files.other, others)]:
        if side is not None and len(side) != len(said):
            counts = f"{files.hypotheses} has {len(said)} lines and {path} has {len(side)}"
            raise InputError(f"{counts}; give files that are aligned line by line")
    return Sides(said, list(zip(*right, strict=True)) if kind == "texts" else right[0], others)


Cell = tuple[str, str]  # what stands there, and where


def _column(path: Path, column: str | None, option: str) -> list[Cell]:
    """One cell a line: the line itself, or a column of a table with tabs or (.csv) commas."""
    # A blank line of a table counts here: to pass over it would shift one file against the other.
    tabs = ((where, line.split("\t")) for where, line in lines(path, Bad()))
    commas = ending(path) == ".csv"
    records = comma_records(path, Bad(), blank=True) if commas else tabs
    if column is None and commas:
        said = "a table, whose lines are no texts or labels; name the column to score, or its number from 1"
        raise InputError(f"{path}: {said}, by {option}")
    if column is None:
        cells = [(line, where) for where, line in lines(path, Bad())]
    elif column.isdecimal():
        cells = [_at(record, int(column) - 1, where, option) for where, record in records]
    else:
        place = _header(next(records, None), path, column, option)
        cells = [_at(record, place, where, option) for where, record in records]
    if not cells:
        raise InputError(f"{path}: empty, nothing to score in it; give a file with one example a line")
    return cells


def _at(record: list[str], place: int, where: str, option: str) -> Cell:
    if not 0 <= place < len(record):
        raise InputError(f"{where}: no column {place + 1}, the line has {len(record)}; correct {option} or the line")
    return record[place], where


def _header(first: tuple[str, list[str]] | None, path: Path, column: str, option: str) -> int:
    names = [] if first is None else [name.strip() for name in first[1]]
    if not names:
        raise InputError(f"{path}: empty, nothing to score in it; give a file with one example a line")
    if column not in names:
        raise InputError(f"{path}: no column '{column}' in its first line; {nearest(column, names)} (see {option})")
    return names.index(column)


def _text(cell: str, where: str) -> str:  # noqa: ARG001
    """An empty line is an empty text."""
    return cell


def _label(cell: str, where: str) -> str:
    label = cell.strip()
    if not label:
        raise InputError(f"{where}: no label here; fill it in or remove the line from all files")
    if "\t" in label:
        columns = label.count("\t") + 1
        raise InputError(f"{where}: {columns} columns; say with --hyp-column or --ref-column which one to score")
    return label


def _label_set(separator: str) -> Callable[[str, str], frozenset[str]]:
    """An empty line says that no label applies."""
    return lambda cell, _: frozenset(label for label in map(str.strip, cell.split(separator)) if label)


def _number(cell: str, where: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{where}: '{cell}' is not a finite number; correct it, or choose the column with numbers")
    return value


@dataclass(frozen=True)
class _Sentence:
    where: str
    words: tuple[str, ...] | None
    tags: tuple[str, ...]


def _tags(files: Files) -> Sides:
    """Tagged sentences; where both files hold the words, they must be the same words."""
    hypotheses = _sentences(files.hypotheses, files.hypothesis_column, files.scheme)
    references = _sentences(files.references[0], files.reference_column, files.scheme)
    other = None
    if files.other is not None:
        other = _sentences(files.other, files.hypothesis_column, files.scheme)
    for side in [hypotheses, *([other] if other is not None else [])]:
        if len(side) != len(references):
            counts = f"{side[0].where.rpartition(':')[0]} has {len(side)} sentences and "
            counts += f"{files.references[0]} has {len(references)}"
            raise InputError(f"{counts}; give files that are aligned sentence by sentence")
        for hypothesis, reference in zip(side, references, strict=True):
            _check_same(hypothesis, reference)
    other_tags = None if other is None else [s.tags for s in other]
    return Sides([s.tags for s in hypotheses], [s.tags for s in references], other_tags)


def _check_same(hypothesis: _Sentence, reference: _Sentence) -> None:
    places = f"{hypothesis.where} and {reference.where}"
    if len(hypothesis.tags) != len(reference.tags):
        raise InputError(
            f"{places}: sentences of {len(hypothesis.tags)} and {len(reference.tags)} words; align the files"
        )
    if hypothesis.words is None or reference.words is None:
        return
    differ = [(a, b) for a, b in zip(hypothesis.words, reference.words, strict=True) if a != b]
    if differ:
        raise InputError(f"{places}: the word '{differ[0][0]}' stands where '{differ[0][1]}' does; align the files")


def _sentences(path: Path, column: str | None, scheme: Scheme | None) -> list[_Sentence]:
    """CoNLL's columns; a file with one of them holds the tags alone."""
    if ending(path) == ".conllu":
        read = conll.universal(path, Bad(), tag=column or "upos")
    else:
        read = conll.read(path, Bad(), tag=column, scheme="none")  # broken sequences are scored, not refused
    found = []
    for one in read:
        tags, words = (one.words, None) if one.tags is None else (one.tags, one.words)
        if scheme is not None:
            for number, tag in enumerate(tags, 1):
                tag_parts(tag, scheme, f"{one.where}: word {number}")
        found.append(_Sentence(one.where, words, tags))
    if not found:
        raise InputError(f"{path}: empty, no tagged words in it; give a file with a word and its tag a line")
    return found


def _answers(files: Files) -> Sides:
    """Predictions {id: answer} and SQuAD's JSON; in the order of the latter."""
    if files.hypothesis_column is not None or files.reference_column is not None:
        raise InputError("--hyp-column and --ref-column are for tables; SQuAD's files are JSON")
    answers = list(_squad(files.references[0]))  # an id that stands there twice is two questions, as in the script
    if not answers:
        raise InputError(f"{files.references[0]}: empty, no questions in it; give a SQuAD file")
    notes: list[str] = []
    sides = [
        _predictions(path, answers, files.references[0], notes)
        for path in (files.hypotheses, *([files.other] if files.other else []))
    ]
    return Sides(sides[0], [texts for _, texts in answers], sides[1] if len(sides) > 1 else None, tuple(notes))


def _squad(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each question's id and answers; for scoring it does not matter where in the context they stand."""
    whole = document(path)
    if not isinstance(whole, dict) or "data" not in whole:
        raise InputError(f'{path}: not a SQuAD file; write {{"data": [{{"paragraphs": [{{"qas": […]}}]}}]}}')
    for article in objects_field(whole, "data", str(path)):
        for paragraph in objects_field(article, "paragraphs", str(path)):
            for asked in objects_field(paragraph, "qas", str(path)):
                id = named(asked, "id", str(path))
                texts = [answer.get("text") for answer in objects_field(asked, "answers", f"{path}: {id}")]
                if not id or not all(isinstance(text, str) for text in texts):
                    raise InputError(f"{path}: {id or 'a question'}: needs an id, and a text in each answer")
                yield id, tuple(map(str, texts))


def _predictions(
    path: Path, answers: Sequence[tuple[str, tuple[str, ...]]], ref: Path, notes: list[str]
) -> list[str | None]:
    found = document(path)
    if not isinstance(found, dict):
        raise InputError(f'{path}: not an object of predictions; write {{"question id": "answer", …}}')
    for id, text in found.items():
        if not isinstance(text, str):
            raise InputError(f"{path}: {id}: the prediction is not a string; put it in quotes, or '' for no answer")
    missing = [id for id, _ in answers if id not in found]
    if len(missing) == len(answers):
        raise InputError(f"{path}: no prediction for any question of {ref}; give the predictions for that file")
    if missing:
        notes.append(
            f"{path}: no prediction for {len(missing)} of {len(answers)} questions ({missing[0]} …): they count 0"
        )
    return [found.get(id) for id, _ in answers]
