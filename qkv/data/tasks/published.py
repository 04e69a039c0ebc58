"""Sets that were published in a form of their own: CLINC150, GoEmotions, Restaurant8k."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qkv.data.examples import Labelled, Span, refuse_outside
from qkv.data.readers import text_field
from qkv.data.tasks.fields import counted, object_field, objects_field, texts_field, whole_field
from qkv.data.tasks.lines import Bad, document, lines, objects
from qkv.data.tasks.table import Row, rows
from qkv.errors import InputError, nearest

CLINC_PARTS = {"train": "train", "dev": "val", "test": "test"}
_EMOTIONS = "labels.txt"


def clinc(path: Path, bad: Bad, *, part: str = "train") -> Iterator[Labelled]:
    """CLINC150 (Larson et al., 2019), one JSON file of all parts; "train+oos_train" reads two of them in turn."""
    whole = document(path)
    if not isinstance(whole, dict):
        raise InputError(f'{path}: not a CLINC file; write {{"train": [["text", "intent"], …], …}}')
    for name in (CLINC_PARTS.get(one, one) for one in part.split("+")):
        if not isinstance(whole.get(name), list):
            raise InputError(f"{path}: no part '{name}' in it; {nearest(name, whole)}")
        for number, record in enumerate(whole[name], 1):
            where = f"{path}: {name} {number}"
            with bad:
                if not isinstance(record, list) or len(record) != 2:
                    raise InputError(f'{where}: not a text and its intent; write ["text", "intent"]')
                row = Row(where, dict(zip(("text", "intent"), record, strict=True)))
                yield Labelled(row.text("text"), where, label=row.text("intent"))


def goemotions(path: Path, bad: Bad, *, names: str | None = None) -> Iterator[Labelled]:
    """GoEmotions (Demszky et al., 2020): text, numbers of its emotions, comment's id, without a header.

    `names` is the file with a name a line; without it, labels.txt beside the file, and else the numbers stand.
    """
    beside = path.parent / _EMOTIONS
    known: list[str] | None = None
    if names is not None or beside.is_file():
        known = [line.strip() for _, line in lines(Path(names) if names else beside, Bad()) if line.strip()]
    for row in rows(path, bad, form="tsv", header=False):
        with bad:
            if len(row.columns) != 3:
                said = f"{len(row.columns)} columns where GoEmotions has text, labels and id"
                raise InputError(f"{row.where}: {said}; repair the line")
            labels = tuple(_emotion(one.strip(), known, row.where) for one in row.text("2").split(","))
            yield Labelled(row.text("1"), row.where, label=labels, id=row.fields["3"])


def _emotion(number: str, known: list[str] | None, where: str) -> str:
    place = counted(number)
    if not isinstance(place, int) or (known is not None and place >= len(known)):
        limit = "" if known is None else f" from 0 to {len(known) - 1}"
        raise InputError(f"{where}: label '{number}' is no number{limit}; correct it")
    return number if known is None else known[place]


def restaurant8k(path: Path, bad: Bad) -> Iterator[Labelled]:
    """Restaurant8k (Coope et al., 2020): what a guest says, with a span for each slot in it.

    The second text is the slots that were asked for, if any; the label is the slots that are filled. `tags.tagged`
    makes BIO tags of the spans.
    """
    for where, record in objects(path, bad):
        with bad:
            text = text_field(object_field(record, "userInput", where), "text", where)
            spans = tuple(_slot(label, text, where) for label in _optional(record, "labels", where))
            context = object_field(record, "context", where) if "context" in record else {}
            asked = " ".join(texts_field(context, "requestedSlots", where)) if "requestedSlots" in context else ""
            slots = tuple(sorted({span.name for span in spans}))
            yield Labelled(text, where, asked or None, slots, spans)


def _optional(record: Mapping[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    return objects_field(record, name, where) if name in record else []


def _slot(label: Mapping[str, Any], text: str, where: str) -> Span:
    name, span = text_field(label, "slot", where), object_field(label, "valueSpan", where)
    start = whole_field(span, "startIndex", where) if "startIndex" in span else 0  # they leave a zero out
    end = whole_field(span, "endIndex", where)
    refuse_outside(start, end, text, where, f"span of '{name}'")
    return Span(start, end, name)
