"""Readers of datasets with a format of their own: CLINC150, GoEmotions, Restaurant8k."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from qkv.data.examples import Span, TextExample, check_span
from qkv.data.formats.fields import int_field, object_field, objects_field, parse_count, string_field, strings_field
from qkv.data.formats.io import ErrorPolicy, json_records, read_json, read_lines
from qkv.data.formats.table import read_rows
from qkv.data.formats.text_table import Row
from qkv.errors import InputError, did_you_mean, quote

CLINC_SPLITS = {"train": "train", "dev": "val", "test": "test"}
_LABELS_FILE = "labels.txt"
_MAX_SPLITS_SHOWN = 20


def read_clinc(path: Path, error_policy: ErrorPolicy, *, split: str = "train") -> Iterator[TextExample]:
    """Read CLINC150 (Larson et al., 2019), one JSON file of all splits; "train+oos_train" reads two of them."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise InputError(f'{path}: not a CLINC file; write {{"train": [["text", "intent"], …], …}}')
    for split_key in (CLINC_SPLITS.get(name, name) for name in split.split("+")):
        if not isinstance(data.get(split_key), list):
            known = [quote(key)[1:-1] for key in islice(data, _MAX_SPLITS_SHOWN)]
            raise InputError(f"{path}: no split '{split_key}'; {did_you_mean(split_key, known)}")
        for number, record in enumerate(data[split_key], 1):
            location = f"{path}: {split_key} {number}"
            with error_policy:
                if not isinstance(record, list) or len(record) != 2:
                    raise InputError(f'{location}: not a text and its intent; write ["text", "intent"]')
                row = Row(location, dict(zip(("text", "intent"), record, strict=True)))
                yield TextExample(row.text("text"), location, label=row.text("intent"))


def read_goemotions(path: Path, error_policy: ErrorPolicy, *, names: str | None = None) -> Iterator[TextExample]:
    """Read GoEmotions (Demszky et al., 2020): text, indices of its emotions and comment id, without a header.

    `names` is a file with one emotion per line, by default labels.txt in the same folder; without one, the labels are
    the indices.
    """
    label_file = path.parent / _LABELS_FILE
    label_names: list[str] | None = None
    if names is not None or label_file.is_file():
        lines = read_lines(Path(names) if names else label_file, ErrorPolicy())
        label_names = [line.strip() for _, line in lines if line.strip()]
    for row in read_rows(path, error_policy, file_type="tsv", header=False, delimiter="tab", required="123"):
        with error_policy:
            if len(row.columns) != 3:
                problem = f"{len(row.columns)} columns instead of text, labels and id"
                raise InputError(f"{row.location}: {problem}; repair the line")
            labels = tuple(_parse_emotion(code.strip(), label_names, row.location) for code in row.text("2").split(","))
            yield TextExample(row.text("1"), row.location, label=labels, id=row.fields["3"])


def _parse_emotion(number: str, label_names: list[str] | None, location: str) -> str:
    index = parse_count(number)
    if not isinstance(index, int) or (label_names is not None and index >= len(label_names)):
        limit = "" if label_names is None else f" from 0 to {len(label_names) - 1}"
        raise InputError(f"{location}: label {quote(number)} is not a number{limit}; correct it")
    return number if label_names is None else label_names[index]


def read_restaurant8k(path: Path, error_policy: ErrorPolicy) -> Iterator[TextExample]:
    """Read Restaurant8k (Coope et al., 2020): utterances of guests, with a span for each slot.

    The second text is the requested slots, if any; the label is the slots that occur in the utterance. `spans_to_tags`
    converts the spans to BIO tags.
    """
    for location, record in json_records(path, error_policy):
        with error_policy:
            text = string_field(object_field(record, "userInput", location), "text", location)
            spans = tuple(_parse_slot(label, text, location) for label in _optional_objects(record, "labels", location))
            context = object_field(record, "context", location) if "context" in record else {}
            requested = strings_field(context, "requestedSlots", location) if "requestedSlots" in context else ()
            slots = tuple(sorted({span.name for span in spans}))
            yield TextExample(text, location, " ".join(requested) or None, slots, spans)


def _optional_objects(record: Mapping[str, Any], name: str, location: str) -> list[dict[str, Any]]:
    return objects_field(record, name, location) if name in record else []


def _parse_slot(label: Mapping[str, Any], text: str, location: str) -> Span:
    name, span = string_field(label, "slot", location), object_field(label, "valueSpan", location)
    start = int_field(span, "startIndex", location) if "startIndex" in span else 0  # the files omit a zero
    end = int_field(span, "endIndex", location)
    check_span(start, end, text, location, f"span of {quote(name)}")
    return Span(start, end, name)
