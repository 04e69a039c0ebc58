"""Readers of the files that `qkv score` scores, one per kind of data.

Files are UTF-8, plain or compressed (.gz, .zst). An invalid file is refused with its name and line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkv.data.formats import conll
from qkv.data.formats.fields import id_field, objects_field
from qkv.data.formats.io import ErrorPolicy, csv_records, file_suffix, read_json, read_lines
from qkv.data.formats.table import read_rows
from qkv.errors import InputError, did_you_mean
from qkv.metrics.entities import EntityScheme, split_tag
from qkv.metrics.metric import DataKind
from qkv.metrics.prediction_records import (
    RECORD_SUFFIXES,
    has_records,
    iter_records,
    prediction_cell,
    prediction_tags,
    predictions_by_id,
)


@dataclass(frozen=True)
class ScoringData:
    """Hypotheses and references of all examples."""

    hypotheses: Sequence[Any]
    """Output of the system, one per example."""
    references: Sequence[Any]
    """Reference of each example; for texts a tuple of references."""
    baseline: Sequence[Any] | None = None
    """Output of another system, if there is one."""
    notes: tuple[str, ...] = ()
    """Remarks for the user."""


@dataclass(frozen=True)
class ScoringFiles:
    """Files to score, and how they are read.

    A column is a name from the header or a number from 1; for CoNLL-U a field such as upos.
    """

    hypotheses: Path
    """Output of the system."""
    references: tuple[Path, ...]
    """Reference files; only texts may have several."""
    baseline: Path | None = None
    """Output of another system."""
    hypothesis_column: str | None = None
    """Column of the hypotheses; None: the whole line."""
    reference_column: str | None = None
    """Column of the references; None: the whole line."""
    label_separator: str = ","
    """Separator of the labels of one example."""
    scheme: EntityScheme | None = None
    """Scheme that all tags must have; None: tags of any kind."""


def read_scoring_files(kind: DataKind, files: ScoringFiles) -> ScoringData:
    """Read all files, and check that they are aligned."""
    if len(files.references) > 1 and kind != "texts":
        raise InputError(f"{len(files.references)} files of references: only texts may have several; give one --ref")
    if kind == "answers":
        return _read_answer_files(files)
    if kind == "tags":
        return _read_tag_files(files)
    separator = files.label_separator
    hypothesis_cells = _read_predictions_column(files.hypotheses, files.hypothesis_column, separator)
    reference_cells = [_read_references(path, files.reference_column, separator) for path in files.references]
    baseline_cells = (
        None if files.baseline is None else _read_predictions_column(files.baseline, files.hypothesis_column, separator)
    )
    parse = {
        "texts": _parse_text,
        "labels": _parse_label,
        "numbers": _parse_number,
        "label_sets": _label_set_parser(files.label_separator),
    }[kind]
    hypotheses, *references = [[parse(*cell) for cell in cells] for cells in (hypothesis_cells, *reference_cells)]
    baseline = None if baseline_cells is None else [parse(*cell) for cell in baseline_cells]
    for path, values in [*zip(files.references, references, strict=True), (files.baseline, baseline)]:
        if values is not None and len(values) != len(hypotheses):
            counts = f"{files.hypotheses} has {len(hypotheses)} lines and {path} has {len(values)}"
            raise InputError(f"{counts}; give files that are aligned line by line")
    return ScoringData(hypotheses, list(zip(*references, strict=True)) if kind == "texts" else references[0], baseline)


Cell = tuple[str, str]  # content and location


def _read_predictions_column(path: Path, column: str | None, separator: str) -> list[Cell]:
    """Read the predictions that `qkv predict` wrote, or one cell per line."""
    if file_suffix(path) in RECORD_SUFFIXES or (column is None and has_records(path)):
        return _read_records(path, column, separator)
    return _read_column(path, column, "--hyp-column")


def _read_references(path: Path, column: str | None, separator: str) -> list[Cell]:
    if file_suffix(path) not in RECORD_SUFFIXES:
        return _read_column(path, column, "--ref-column")
    if column is None:
        raise InputError(f"{path}: has records; give the name of the field to compare with, with --ref-column")
    return _read_records(path, column, separator)


def _read_records(path: Path, column: str | None, separator: str) -> list[Cell]:
    cells = [
        (prediction_cell(record, column, location, separator), location) for location, record in iter_records(path)
    ]
    if not cells:
        raise InputError(f"{path}: is empty; give a file with one example per line")
    return cells


def _read_column(path: Path, column: str | None, option: str) -> list[Cell]:
    """Read one cell per line: the whole line, or a column of a table with tabs or (.csv) commas."""
    # blank lines of a table count: skipping one would misalign the files
    tsv_rows = ((location, line.split("\t")) for location, line in read_lines(path, ErrorPolicy()))
    is_csv = file_suffix(path) == ".csv"
    records = csv_records(path, ErrorPolicy(), keep_blank=True) if is_csv else tsv_rows
    if column is None and is_csv:
        message = "is a table; give the name of the column to score, or its number from 1"
        raise InputError(f"{path}: {message}, with {option}")
    if column is None:
        cells = [(line, location) for location, line in read_lines(path, ErrorPolicy())]
    elif column.isdecimal():
        cells = [_cell_at(record, int(column) - 1, location, option) for location, record in records]
    elif is_csv and column not in _csv_header(path):
        rows = read_rows(path, ErrorPolicy(), required=(column,))  # with another delimiter or encoding
        cells = [(str(row.fields[column]), row.location) for row in rows]
    else:
        column_index = _header_index(next(records, None), path, column, option)
        cells = [_cell_at(record, column_index, location, option) for location, record in records]
    if not cells:
        raise InputError(f"{path}: is empty; give a file with one example per line")
    return cells


def _csv_header(path: Path) -> list[str]:
    """Return the names of the columns of a CSV file with commas."""
    try:
        return [name.strip() for name in next(csv_records(path, ErrorPolicy()), ("", []))[1]]
    except InputError:  # not UTF-8
        return []


def _cell_at(record: list[str], column_index: int, location: str, option: str) -> Cell:
    if not 0 <= column_index < len(record):
        raise InputError(
            f"{location}: no column {column_index + 1}, the line has {len(record)}; correct {option} or the line"
        )
    return record[column_index], location


def _header_index(header: tuple[str, list[str]] | None, path: Path, column: str, option: str) -> int:
    names = [] if header is None else [name.strip() for name in header[1]]
    if not names:
        raise InputError(f"{path}: is empty; give a file with one example per line")
    if column not in names:
        raise InputError(
            f"{path}: no column '{column}' in its first line; {did_you_mean(column, names)} (see {option})"
        )
    return names.index(column)


def _parse_text(cell: str, location: str) -> str:  # noqa: ARG001
    """Return the cell; an empty line is an empty text."""
    return cell


def _parse_label(cell: str, location: str) -> str:
    label = cell.strip()
    if not label:
        raise InputError(f"{location}: has no label; add it, or remove the line from all files")
    if "\t" in label:
        columns = label.count("\t") + 1
        raise InputError(f"{location}: has {columns} columns; select one with --hyp-column or --ref-column")
    return label


def _label_set_parser(separator: str) -> Callable[[str, str], frozenset[str]]:
    """Return a parser of sets of labels; an empty line is an empty set."""
    return lambda cell, _: frozenset(label for label in map(str.strip, cell.split(separator)) if label)


def _parse_number(cell: str, location: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{location}: '{cell}' is not a finite number; correct it, or choose the column with numbers")
    return value


@dataclass(frozen=True)
class _Sentence:
    location: str
    words: tuple[str, ...] | None
    tags: tuple[str, ...]


def _read_tag_files(files: ScoringFiles) -> ScoringData:
    """Read tagged sentences; if both files contain the words, the words must be equal."""
    hypotheses = _read_sentences(files.hypotheses, files.hypothesis_column, files.scheme)
    references = _read_sentences(files.references[0], files.reference_column, files.scheme)
    baseline = None
    if files.baseline is not None:
        baseline = _read_sentences(files.baseline, files.hypothesis_column, files.scheme)
    for sentences in [hypotheses, *([baseline] if baseline is not None else [])]:
        if len(sentences) != len(references):
            counts = f"{sentences[0].location.rpartition(':')[0]} has {len(sentences)} sentences and "
            counts += f"{files.references[0]} has {len(references)}"
            raise InputError(f"{counts}; give files that are aligned sentence by sentence")
        for hypothesis, reference in zip(sentences, references, strict=True):
            _check_same_words(hypothesis, reference)
    baseline_tags = None if baseline is None else [s.tags for s in baseline]
    return ScoringData([s.tags for s in hypotheses], [s.tags for s in references], baseline_tags)


def _check_same_words(hypothesis: _Sentence, reference: _Sentence) -> None:
    locations = f"{hypothesis.location} and {reference.location}"
    if len(hypothesis.tags) != len(reference.tags):
        raise InputError(
            f"{locations}: sentences of {len(hypothesis.tags)} and {len(reference.tags)} words; align the files"
        )
    if hypothesis.words is None or reference.words is None:
        return
    differences = [(a, b) for a, b in zip(hypothesis.words, reference.words, strict=True) if a != b]
    if differences:
        raise InputError(
            f"{locations}: the words '{differences[0][0]}' and '{differences[0][1]}' differ; align the files"
        )


def _read_sentences(path: Path, column: str | None, scheme: EntityScheme | None) -> list[_Sentence]:
    """Read CoNLL columns, where the only column of a file is its tags, or records of `qkv predict`."""
    if has_records(path):
        return [
            _checked_sentence(location, *prediction_tags(record, column, location), scheme)
            for location, record in iter_records(path)
        ]
    if file_suffix(path) == ".conllu":
        examples = conll.read_conllu(path, ErrorPolicy(), tag=column or "upos")
    else:
        examples = conll.read(
            path, ErrorPolicy(), tag=column, scheme="none"
        )  # invalid sequences are scored, not refused
    sentences = []
    for example in examples:
        tags, words = (example.words, None) if example.tags is None else (example.tags, example.words)
        sentences.append(_checked_sentence(example.location, tags, words, scheme))
    if not sentences:
        raise InputError(f"{path}: is empty; give a file with a word and its tag per line")
    return sentences


def _checked_sentence(
    location: str, tags: tuple[str, ...], words: tuple[str, ...] | None, scheme: EntityScheme | None
) -> _Sentence:
    if scheme is not None:
        for number, tag in enumerate(tags, 1):
            split_tag(tag, scheme, f"{location}: word {number}")
    return _Sentence(location, words, tags)


def _read_answer_files(files: ScoringFiles) -> ScoringData:
    """Read predictions {id: answer} and a SQuAD file, in the order of the SQuAD file."""
    if files.hypothesis_column is not None or files.reference_column is not None:
        raise InputError("--hyp-column and --ref-column are for tables; SQuAD's files are JSON")
    answers = list(_read_squad(files.references[0]))  # a repeated id is two questions, as in the official script
    if not answers:
        raise InputError(f"{files.references[0]}: has no questions; give a SQuAD file")
    notes: list[str] = []
    predictions = [
        _read_predictions(path, answers, files.references[0], notes)
        for path in (files.hypotheses, *([files.baseline] if files.baseline else []))
    ]
    return ScoringData(
        predictions[0], [texts for _, texts in answers], predictions[1] if len(predictions) > 1 else None, tuple(notes)
    )


def _read_squad(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the id and the answers of each question. Offsets of answers are not checked: scoring does not use them."""
    raw_json = read_json(path)
    if not isinstance(raw_json, dict) or "data" not in raw_json:
        raise InputError(f'{path}: not a SQuAD file; write {{"data": [{{"paragraphs": [{{"qas": […]}}]}}]}}')
    for article in objects_field(raw_json, "data", str(path)):
        for paragraph in objects_field(article, "paragraphs", str(path)):
            for question in objects_field(paragraph, "qas", str(path)):
                question_id = id_field(question, "id", str(path))
                texts = [answer.get("text") for answer in objects_field(question, "answers", f"{path}: {question_id}")]
                if not question_id or not all(isinstance(text, str) for text in texts):
                    raise InputError(f"{path}: {question_id or 'a question'}: needs an id, and a text in each answer")
                yield question_id, tuple(map(str, texts))


def _read_predictions(
    path: Path, answers: Sequence[tuple[str, tuple[str, ...]]], reference_path: Path, notes: list[str]
) -> list[str | None]:
    predictions = predictions_by_id(path) if has_records(path) else read_json(path)
    if not isinstance(predictions, dict):
        raise InputError(f'{path}: not an object of predictions; write {{"question id": "answer", …}}')
    for question_id, text in predictions.items():
        if not isinstance(text, str):
            raise InputError(
                f"{path}: {question_id}: the prediction is not a string; put it in quotes, or '' for no answer"
            )
    missing = [question_id for question_id, _ in answers if question_id not in predictions]
    if len(missing) == len(answers):
        raise InputError(
            f"{path}: has no prediction for any question of {reference_path}; give the predictions for that file"
        )
    if missing:
        notes.append(
            f"{path}: has no prediction for {len(missing)} of {len(answers)} questions ({missing[0]} …): they count 0"
        )
    return [predictions.get(question_id) for question_id, _ in answers]
