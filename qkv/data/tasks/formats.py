"""Every format by its name, and the one way in: `read("glue:MNLI", folder, part="dev")`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from qkv.data.examples import Choice, Examples, Labelled, Pictured, Question, Tagged
from qkv.data.pair import Example, Pair
from qkv.data.tasks import choices, conll, glue, pairs, pictures, published, squad, superglue, table
from qkv.data.tasks.folder import Names, find
from qkv.data.tasks.lines import Bad
from qkv.data.tasks.table import collect
from qkv.errors import InputError, nearest

_TABLES = tuple(table.ENDINGS)
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_COLUMNS = (".conll", ".txt", ".bio", ".iob", ".tsv", ".annotated", "")


@dataclass(frozen=True, slots=True)
class Format:
    """What kind of example a format gives, what reads a file of it, one line on it, and how its files are called."""

    example: type
    reader: Callable[..., Iterator[Any]]
    says: str
    names: Names = field(default_factory=Names)
    parts_inside: bool = False  # one file or folder holds all parts, and its reader is told which
    has_parts: Callable[[Path], bool] = Path.is_dir  # whether what is named may be asked for one of several parts

    def in_folders(self, path: Path) -> bool:
        """Whether a folder holds a folder for each part, any of which can be named itself."""
        return self.parts_inside and not self.names.files and self.has_parts(path)


def _table(example: type, reader: Callable[..., Iterator[Any]], says: str) -> Format:
    return Format(example, reader, says, Names(endings=_TABLES))


def _labelled(form: str) -> Format:
    endings = tuple(ending for ending, its in table.ENDINGS.items() if its == form)
    says = {"csv": "CSV with named columns", "tsv": "TSV, quoting off", "jsonl": "JSON lines, or a JSON list"}[form]
    return Format(Labelled, partial(table.labelled, form=form), f"labelled texts in {says}", Names(endings=endings))


def _glue(name: str, task: glue.Task) -> Format:
    return Format(Labelled, partial(glue.read, task=name), f"GLUE: {task.says}", Names(task.files, task.folders))


def _superglue(name: str, task: superglue.Task) -> Format:
    reader = partial(superglue.read, task=name)
    return Format(task.example, reader, f"SuperGLUE: {task.says}", Names(task.files, (name,)))


_EXAM = Names(endings=_JSON_LINES)
_CLINC = Names({"train": ("data_full.json",)})
_BANKING = partial(table.labelled, text="text", label="category")
FORMATS: dict[str, Format] = {
    "table": _table(Labelled, table.labelled, "labelled texts in CSV, TSV or JSON lines, told by the name's ending"),
    **{form: _labelled(form) for form in table.FORMS},
    **{f"glue:{name}": _glue(name, task) for name, task in glue.TASKS.items()},
    **{f"superglue:{name}": _superglue(name, task) for name, task in superglue.TASKS.items()},
    "banking77": Format(Labelled, _BANKING, "intents of a bank's customers", Names(endings=(".csv",))),
    "clinc": Format(Labelled, published.clinc, "CLINC150: intents, some out of scope", _CLINC, parts_inside=True),
    "goemotions": Format(Labelled, published.goemotions, "several emotions a text", Names(endings=(".tsv",))),
    "restaurant8k": Format(Labelled, published.restaurant8k, "spans of slots in turns", Names(endings=(".json",))),
    "conll": Format(Tagged, conll.read, "CoNLL: a word a line, its tags beside it", Names(endings=_COLUMNS)),
    "words": Format(Tagged, conll.listed, "JSON lines of words and their tags", Names(endings=_JSON_LINES)),
    "conllu": Format(Tagged, conll.universal, "CoNLL-U of Universal Dependencies", Names(endings=(".conllu",))),
    "squad": Format(Question, squad.read, "SQuAD 1.1 and 2.0", Names(endings=(".json",))),
    "questions": Format(Question, squad.flat, "questions with contexts, JSON lines", Names(endings=_JSON_LINES)),
    "choices": _table(Choice, choices.table, "multiple choice in a table"),
    "swag": Format(Choice, choices.swag, "SWAG's CSV", Names(endings=(".csv",))),
    "arc": Format(Choice, choices.exam, "ARC's JSON lines", _EXAM),
    "commonsense_qa": Format(Choice, choices.exam, "CommonsenseQA's JSON lines", _EXAM),
    "idx": Format(Pictured, pictures.idx, "pictures in MNIST's files", pictures.IDX),
    "images": Format(
        Pictured,
        pictures.images,
        "pictures, a folder a class, or named in a table",
        parts_inside=True,
        has_parts=pictures.has_parts,
    ),
    "parallel": _table(Pair, pairs.parallel, "source and target in a table"),
    "aligned": Format(Pair, pairs.aligned, "source and target in two files, line by line"),
    "summaries": _table(Example, pairs.summaries, "documents and summaries in a table"),
    "scitldr": Format(Example, pairs.scitldr, "SciTLDR's JSON lines", _EXAM),
}


def read(
    format: str,
    path: str | Path,
    *,
    part: str | None = None,
    columns: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
    **options: Any,
) -> Examples[Any]:
    """All examples of a file in one of the FORMATS, or of the file of a `part` in a folder of them.

    `columns` says which column is which, `{"text": "review", "label": "stars"}`; `options` are the reader's others.
    What is bad is one line with file and line number; with `skip_bad` the rest is read and `skipped` has those lines.
    """
    reader, file, settings = _opened(format, path, part, {**(columns or {}), **options})
    return collect(reader, file, skip_bad, **settings)


def stream(
    format: str, path: str | Path, bad: Bad, *, part: str | None = None, columns: Mapping[str, Any] | None = None
) -> Iterator[Any]:
    """The same examples one by one as they are read, for files that are too large to be held; `bad` has what is bad."""
    reader, file, settings = _opened(format, path, part, columns or {})
    yield from reader(file, bad, **settings)


def _opened(
    format: str, path: str | Path, part: str | None, settings: Mapping[str, Any]
) -> tuple[Callable[..., Iterator[Any]], Path, dict[str, Any]]:
    """What reads a format, the file that it is to read, and the reader's settings."""
    known = named(format)
    _refuse_unknown(format, settings)
    if not known.parts_inside:
        return known.reader, find(Path(path), part, known.names), dict(settings)
    file = find(Path(path), None, known.names) if known.names.files else Path(path)
    return known.reader, file, {**settings, "part": part or "train"}


def has_parts(format: str, path: str | Path) -> bool:
    """Whether what is named holds several parts, so that one of them may be asked for."""
    return named(format).has_parts(Path(path))


def named(format: str) -> Format:
    """The format of a name, in capitals or not: few remember that it is CoLA and not COLA."""
    names = {name.casefold(): name for name in FORMATS}
    if format.casefold() not in names:
        raise InputError(f"data format '{format}' is unknown; {nearest(format.casefold(), names)}")
    return FORMATS[names[format.casefold()]]


def settings_of(format: str) -> list[str]:
    """The columns and options that a format's reader takes."""
    reader = named(format).reader
    fixed = {"part", *(reader.keywords if isinstance(reader, partial) else ())}
    parameters = inspect.signature(reader).parameters.values()
    return [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name not in fixed]


def _refuse_unknown(format: str, settings: Mapping[str, Any]) -> None:
    taken = settings_of(format)
    for name in settings:
        if name not in taken:
            hint = nearest(name, taken) if taken else "its columns are fixed"
            raise InputError(f"format '{format}' has no column or option '{name}'; {hint}")
    for one in inspect.signature(named(format).reader).parameters.values():
        if one.kind is one.KEYWORD_ONLY and one.default is one.empty and one.name not in settings:
            raise InputError(f"format '{format}' needs '{one.name}'; name it")
