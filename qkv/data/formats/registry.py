"""Every format by its name, and the one way in: `read("glue:MNLI", folder, split="dev")`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from qkv.data.examples import Examples, ImageExample, MultipleChoiceExample, QAExample, TaggedExample, TextExample
from qkv.data.formats import choices, clinc_goemotions, conll, glue, images, pairs, squad, superglue, table
from qkv.data.formats.io import ErrorPolicy
from qkv.data.formats.split_files import SplitFiles, find_split_file
from qkv.data.formats.table import collect_examples
from qkv.data.pair import Pair, SourceWithReferences
from qkv.errors import InputError, did_you_mean

_TABLE_SUFFIXES = tuple(table.SUFFIXES)
_JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
_CONLL_SUFFIXES = (".conll", ".txt", ".bio", ".iob", ".tsv", ".annotated", "")


@dataclass(frozen=True, slots=True)
class DatasetFormat:
    """What kind of example a format gives, what reads a file of it, one line on it, and how its files are called."""

    example_type: type
    reader: Callable[..., Iterator[Any]]
    description: str
    split_files: SplitFiles = field(default_factory=SplitFiles)
    reader_takes_split: bool = False  # one file or folder holds all parts, and its reader is told which
    has_splits: Callable[[Path], bool] = Path.is_dir  # whether what is named may be asked for one of several parts

    def splits_in_folders(self, path: Path) -> bool:
        """Whether a folder holds a folder for each part, any of which can be named itself."""
        return self.reader_takes_split and not self.split_files.files and self.has_splits(path)


def _table_format(example_type: type, reader: Callable[..., Iterator[Any]], description: str) -> DatasetFormat:
    return DatasetFormat(example_type, reader, description, SplitFiles(suffixes=_TABLE_SUFFIXES))


def _labeled_format(file_type: str) -> DatasetFormat:
    suffixes = tuple(suffix for suffix, suffix_type in table.SUFFIXES.items() if suffix_type == file_type)
    description = {"csv": "CSV with named columns", "tsv": "TSV, quoting off", "jsonl": "JSON lines, or a JSON list"}[file_type]
    return DatasetFormat(TextExample, partial(table.read_labeled, file_type=file_type), f"labelled texts in {description}", SplitFiles(suffixes=suffixes))


def _glue_format(name: str, task: glue.GlueTask) -> DatasetFormat:
    return DatasetFormat(TextExample, partial(glue.read, task=name), f"GLUE: {task.description}", SplitFiles(task.files, task.folders))


def _superglue_format(name: str, task: superglue.SuperGlueTask) -> DatasetFormat:
    reader = partial(superglue.read, task=name)
    return DatasetFormat(task.example_type, reader, f"SuperGLUE: {task.description}", SplitFiles(task.files, (name,)))


_JSONL_FILES = SplitFiles(suffixes=_JSONL_SUFFIXES)
_CLINC_FILES = SplitFiles({"train": ("data_full.json",)})
_READ_BANKING77 = partial(table.read_labeled, text="text", label="category")
FORMATS: dict[str, DatasetFormat] = {
    "table": _table_format(TextExample, table.read_labeled, "labelled texts in CSV, TSV or JSON lines, told by the name's ending"),
    **{form: _labeled_format(form) for form in table.FILE_TYPES},
    **{f"glue:{name}": _glue_format(name, task) for name, task in glue.TASKS.items()},
    **{f"superglue:{name}": _superglue_format(name, task) for name, task in superglue.TASKS.items()},
    "banking77": DatasetFormat(TextExample, _READ_BANKING77, "intents of a bank's customers", SplitFiles(suffixes=(".csv",))),
    "clinc": DatasetFormat(TextExample, clinc_goemotions.read_clinc, "CLINC150: intents, some out of scope", _CLINC_FILES, reader_takes_split=True),
    "goemotions": DatasetFormat(TextExample, clinc_goemotions.read_goemotions, "several emotions a text", SplitFiles(suffixes=(".tsv",))),
    "restaurant8k": DatasetFormat(TextExample, clinc_goemotions.read_restaurant8k, "spans of slots in turns", SplitFiles(suffixes=(".json",))),
    "conll": DatasetFormat(TaggedExample, conll.read, "CoNLL: a word a line, its tags beside it", SplitFiles(suffixes=_CONLL_SUFFIXES)),
    "words": DatasetFormat(TaggedExample, conll.read_jsonl, "JSON lines of words and their tags", SplitFiles(suffixes=_JSONL_SUFFIXES)),
    "conllu": DatasetFormat(TaggedExample, conll.read_conllu, "CoNLL-U of Universal Dependencies", SplitFiles(suffixes=(".conllu",))),
    "squad": DatasetFormat(QAExample, squad.read, "SQuAD 1.1 and 2.0", SplitFiles(suffixes=(".json",))),
    "questions": DatasetFormat(QAExample, squad.read_jsonl, "questions with contexts, JSON lines", SplitFiles(suffixes=_JSONL_SUFFIXES)),
    "choices": _table_format(MultipleChoiceExample, choices.read_table, "multiple choice in a table"),
    "swag": DatasetFormat(MultipleChoiceExample, choices.read_swag, "SWAG's CSV", SplitFiles(suffixes=(".csv",))),
    "arc": DatasetFormat(MultipleChoiceExample, choices.read_arc, "ARC's JSON lines", _JSONL_FILES),
    "commonsense_qa": DatasetFormat(MultipleChoiceExample, choices.read_arc, "CommonsenseQA's JSON lines", _JSONL_FILES),
    "idx": DatasetFormat(ImageExample, images.read_idx, "pictures in MNIST's files", images.IDX_FILES),
    "images": DatasetFormat(
        ImageExample,
        images.read_images,
        "pictures, a folder a class, or named in a table",
        reader_takes_split=True,
        has_splits=images.has_splits,
    ),
    "parallel": _table_format(Pair, pairs.read_parallel, "source and target in a table"),
    "aligned": DatasetFormat(Pair, pairs.read_aligned, "source and target in two files, line by line"),
    "summaries": _table_format(SourceWithReferences, pairs.read_summaries, "documents and summaries in a table"),
    "scitldr": DatasetFormat(SourceWithReferences, pairs.read_scitldr, "SciTLDR's JSON lines", _JSONL_FILES),
}


def read(
    format: str,
    path: str | Path,
    *,
    split: str | None = None,
    columns: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
    **options: Any,
) -> Examples[Any]:
    """All examples of a file in one of the FORMATS, or of the file of a `split` in a folder of them.

    `columns` says which column is which, `{"text": "review", "label": "stars"}`; `options` are the reader's others.
    What is bad is one line with file and line number; with `skip_bad` the rest is read and `skipped` has those lines.
    """
    reader, file, settings = _resolve(format, path, split, {**(columns or {}), **options})
    return collect_examples(reader, file, skip_bad, **settings)


def iter_examples(
    format: str, path: str | Path, error_policy: ErrorPolicy, *, split: str | None = None, columns: Mapping[str, Any] | None = None
) -> Iterator[Any]:
    """The same examples one by one as they are read, for files that are too large to be held; `error_policy` has what is bad."""
    reader, file, settings = _resolve(format, path, split, columns or {})
    yield from reader(file, error_policy, **settings)


def _resolve(
    format: str, path: str | Path, split: str | None, settings: Mapping[str, Any]
) -> tuple[Callable[..., Iterator[Any]], Path, dict[str, Any]]:
    """What reads a format, the file that it is to read, and the reader's settings."""
    dataset_format = get_format(format)
    _check_options(format, settings)
    if not dataset_format.reader_takes_split:
        return dataset_format.reader, find_split_file(Path(path), split, dataset_format.split_files), dict(settings)
    file = find_split_file(Path(path), None, dataset_format.split_files) if dataset_format.split_files.files else Path(path)
    return dataset_format.reader, file, {**settings, "split": split or "train"}


def has_splits(format: str, path: str | Path) -> bool:
    """Whether what is named holds several parts, so that one of them may be asked for."""
    return get_format(format).has_splits(Path(path))


def get_format(format: str) -> DatasetFormat:
    """The format of a name, in capitals or not: few remember that it is CoLA and not COLA."""
    canonical_names = {name.casefold(): name for name in FORMATS}
    if format.casefold() not in canonical_names:
        raise InputError(f"data format '{format}' is unknown; {did_you_mean(format.casefold(), canonical_names)}")
    return FORMATS[canonical_names[format.casefold()]]


def reader_options(format: str) -> list[str]:
    """The columns and options that a format's reader takes."""
    reader = get_format(format).reader
    fixed = {"split", *(reader.keywords if isinstance(reader, partial) else ())}
    parameters = inspect.signature(reader).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in fixed]


def _check_options(format: str, settings: Mapping[str, Any]) -> None:
    known_options = reader_options(format)
    for name in settings:
        if name not in known_options:
            hint = did_you_mean(name, known_options) if known_options else "its columns are fixed"
            raise InputError(f"format '{format}' has no column or option '{name}'; {hint}")
    for parameter in inspect.signature(get_format(format).reader).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty and parameter.name not in settings:
            raise InputError(f"format '{format}' needs '{parameter.name}'; name it")
