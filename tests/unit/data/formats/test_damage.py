"""One law for every format: whatever somebody has done to a file, reading it succeeds or says in one line what is
wrong, and skipping what is bad leaves the rest."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from small_pictures import write_folder, write_idx
from task_files import tabs, written
from test_choice_reader import HUB, OFFICIAL, PLAIN, SWAG, SWAG_ROW
from test_conll_reader import CONLL_2003, EWT
from test_glue_reader import FILES
from test_published_readers import CLINC, turn
from test_squad_reader import WHO, squad
from test_superglue_reader import RECORDS

from qkv.data.formats import FORMATS, read
from qkv.errors import InputError

FLAT = {"id": "q", "question": "Who?", "context": "Ada.", "answers": {"text": ["Ada"], "answer_start": [0]}}
JSON: dict[str, Any] = {
    **{f"superglue:{task}": record for task, record in RECORDS.items()},
    "arc": OFFICIAL,
    "commonsense_qa": HUB,
    "choices": PLAIN,
    "questions": FLAT,
    "words": {"words": ["New", "York"], "tags": ["B-x", "I-x"]},
    "jsonl": {"text": "a", "label": "x"},
    "scitldr": {"source": ["a", "b"], "target": ["c"]},
    "summaries": {"document": "a", "summary": "b"},
    "parallel": {"source": "a", "target": "b"},
    "pairs:jsonl": {"source": "a", "target": "b"},
}
WHOLE: dict[str, Any] = {
    "squad": json.loads(squad(WHO, {**WHO, "id": "q2"})),
    "clinc": CLINC,
    "restaurant8k": [
        turn("5 of us", ("people", {"startIndex": 0, "endIndex": 7}), context={"requestedSlots": ["people"]})
    ],
}
TEXT = {
    **{f"glue:{name.split()[0]}": tabs(*rows) for name, (_, rows, _) in FILES.items() if "CoLA" not in name},
    "glue:CoLA": tabs("gj04|1||Fred ran.", "bc01|0|*|Ran fred."),
    "glue:MNLI-m": tabs(*FILES["MNLI train"][1]),
    "table": 'text,label\n"a\nb",x\nc,y\n',
    "csv": 'text,label\n"a\nb",x\nc,y\n',
    "tsv": "text\tlabel\na\tx\n",
    "banking77": 'text,category\n"a\nb",x\nc,y\n',
    "goemotions": tabs("a|0,1|id", "b|1|id"),
    "swag": f"{SWAG},label\n{SWAG_ROW},2\n",
    "conll": CONLL_2003,
    "conllu": tabs(*EWT.split("\n")),
    "aligned": "one\ntwo\nthree\n",
    "pairs:tsv": "a\tb\nc\td\n",
    "cmudict": ";;; head\nA  AH0\nA(1)  EY1\n",
}
JUNK = [None, True, -1, 10**30, 0.5, "", "x\ny", "\ud800", [], {}, [[]], [None], {"text": []}, "9" * 5000]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value in a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in inside for place in places(one, (*path, key)))]


def damaged(value: Any, place: tuple[Any, ...], junk: Any) -> Any:
    if not place:
        return junk
    changed = copy.deepcopy(value)
    inside = changed
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = junk
    return changed


def without(value: Any, place: tuple[Any, ...]) -> Any:
    changed = copy.deepcopy(value)
    inside = changed
    for key in place[:-1]:
        inside = inside[key]
    del inside[place[-1]]
    return changed


def said_of(format: str, path: Path, skip_bad: bool) -> list[str]:
    """What reading complains of; anything but an InputError goes on to fail the test."""
    options = {"targets": str(path.with_name("targets.txt"))} if format == "aligned" else {}
    try:
        return read(format, path, skip_bad=skip_bad, **options).skipped
    except InputError as error:
        return [str(error)]


def survives(format: str, path: Path) -> None:
    for skip_bad in (False, True):
        for said in said_of(format, path, skip_bad):
            assert "\n" not in said
            assert str(path.parent) in said


def test_every_format_has_a_sample_here() -> None:
    assert {*JSON, *WHOLE, *TEXT, "idx", "images", "parquet"} == set(FORMATS.names())


@pytest.mark.parametrize("format", [*JSON, *WHOLE])
def test_json_that_holds_anything_anywhere_is_read_or_refused(tmp_path: Path, format: str) -> None:
    sample = JSON.get(format, WHOLE.get(format))
    ends = "" if format in WHOLE else f"\n{json.dumps(sample)}\n"
    path = tmp_path / ("a.json" if format in WHOLE else "a.jsonl")
    written(path, json.dumps(sample) + ends)
    assert not read(format, path).skipped
    for place in places(sample):
        changes = [damaged(sample, place, junk) for junk in JUNK] + ([without(sample, place)] if place else [])
        for changed in changes:
            survives(format, written(path, json.dumps(changed) + ends))


@pytest.mark.parametrize("format", TEXT)
def test_text_with_any_bytes_changed_is_read_or_refused(tmp_path: Path, format: str) -> None:
    path = written(tmp_path / "a.csv", TEXT[format])
    written(tmp_path / "targets.txt", TEXT[format])
    read(format, path, **({"targets": str(path)} if format == "aligned" else {}))
    chance = random.Random(format)
    for _ in range(60):
        content = bytearray(TEXT[format].encode())
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(content))
            content[place : place + chance.randint(0, 2)] = chance.choice(
                [b"", b"\t", b"\n", b"\n\n", b'"', b"\xe9", b",", b"\x00", b" ", b"\r"]
            )
        survives(format, written(path, bytes(content)))


@pytest.mark.parametrize("format", ["idx", "images"])
def test_pictures_with_any_bytes_changed_are_read_or_refused(tmp_path: Path, format: str) -> None:
    folder = write_idx(tmp_path, {"train": 3}) if format == "idx" else write_folder(tmp_path, 3)
    chance = random.Random(format)
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        whole = path.read_bytes()
        for _ in range(40):
            content = bytearray(whole)
            place = chance.randrange(min(len(content), 60))
            content[place : place + chance.randint(0, 2)] = chance.randbytes(chance.randint(0, 2))
            survives(format, written(path, bytes(content)).parents[0 if format == "idx" else 1])
        path.write_bytes(whole)
