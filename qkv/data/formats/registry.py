"""The dataset formats by name, and registration of further ones.

A format is a reader function with a description. A user's format is registered with its reader:

    @register_format("reviews", description="product reviews with stars")
    def read_reviews(path: Path, error_policy: ErrorPolicy, *, stars: str = "stars") -> Iterator[TextExample]:
        for location, record in json_records(path, error_policy):
            with error_policy:
                yield TextExample(record["text"], location, label=str(record[stars]))

The reader's keyword-only arguments are the options of the format: `data.columns` in a recipe, `--reader-option` on the
command line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, overload

from qkv.data.examples import ImageExample, MultipleChoiceExample, QAExample, TaggedExample, TextExample
from qkv.data.formats import choices, clinc_goemotions, conll, glue, images, pairs, squad, superglue, table
from qkv.data.formats.split_files import SplitFiles, has_split_files
from qkv.data.pair import Pair, SourceWithReferences
from qkv.registry import Registry

Reader = Callable[..., Iterator[Any]]  # (path, error_policy, *, options) -> examples
ReaderT = TypeVar("ReaderT", bound=Reader)
PAIR_PREFIX = "pairs:"  # of the pair formats whose plain name is also that of a format for labeled texts


@dataclass(frozen=True, slots=True)
class DatasetFormat:
    """A file format of a task's examples."""

    example_type: type
    """Class of the examples."""
    reader: Reader
    """Function `(path, error_policy, *, options)` that yields the examples of a file."""
    description: str
    """One line for the list of formats."""
    split_files: SplitFiles = field(default_factory=SplitFiles)
    """Names of the files of each split in a folder."""
    reader_takes_split: bool = False
    """Whether one file or folder contains all splits, so that the reader has an argument `split`."""
    has_splits: Callable[[Path], bool] = has_split_files
    """Function that returns whether a path contains several splits."""
    second_file_option: str | None = None
    """Option of the reader for the second file of a format whose examples are in two files."""

    @property
    def options(self) -> list[str]:
        """Names of the columns and other options that the reader takes."""
        bound = {"split", *(self.reader.keywords if isinstance(self.reader, partial) else ())}
        parameters = inspect.signature(self.reader).parameters.values()
        return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in bound]

    @property
    def required_options(self) -> list[str]:
        """Names of the options that have no default."""
        parameters = inspect.signature(self.reader).parameters
        return [name for name in self.options if parameters[name].default is inspect.Parameter.empty]

    def splits_in_folders(self, path: Path) -> bool:
        """Return whether a folder has one subfolder per split, each of which can be read by itself."""
        return self.reader_takes_split and not self.split_files.files and self.has_splits(path)


FORMATS: Registry[DatasetFormat] = Registry("data format", {})


@overload
def register_format(name: str, reader: DatasetFormat) -> DatasetFormat: ...


@overload
def register_format(
    name: str, reader: ReaderT, *, example_type: type = ..., description: str = ..., suffixes: tuple[str, ...] = ...
) -> ReaderT: ...


@overload
def register_format(
    name: str, reader: None = ..., *, example_type: type = ..., description: str = ..., suffixes: tuple[str, ...] = ...
) -> Callable[[ReaderT], ReaderT]: ...


def register_format(
    name: str,
    reader: Any = None,
    *,
    example_type: type = TextExample,
    description: str = "",
    suffixes: tuple[str, ...] = (),
) -> Any:
    """Register a format under a new name, as a function call or as a decorator of the reader.

    Args:
        name: the value of `data.format` in a recipe and of `--format`.
        reader: function `(path, error_policy, *, options)` that yields examples, or a `DatasetFormat`.
        example_type: class of the examples.
        description: one line for the list of formats; by default the first line of the reader's docstring.
        suffixes: endings of the files in a folder that has one file per split, such as (".csv",).
    """
    if reader is None:
        return lambda decorated: register_format(
            name, decorated, example_type=example_type, description=description, suffixes=suffixes
        )
    if isinstance(reader, DatasetFormat):
        return FORMATS.register(name, reader)
    first_line = (inspect.getdoc(reader) or name).partition("\n")[0]
    FORMATS.register(
        name, DatasetFormat(example_type, reader, description or first_line, SplitFiles(suffixes=suffixes))
    )
    return reader


def get_format(name: str) -> DatasetFormat:
    """Return the format of a name. Case is ignored, because few remember that it is CoLA and not COLA."""
    canonical_names = {known.casefold(): known for known in FORMATS.names()}
    return FORMATS.get(canonical_names.get(name.casefold(), name))


def pair_format_name(name: str) -> str:
    """Return the registered name of a format for pairs: "tsv" and "jsonl" of pairs are "pairs:tsv", "pairs:jsonl"."""
    return PAIR_PREFIX + name if PAIR_PREFIX + name in FORMATS else name


def pair_formats() -> list[str]:
    """Return the names of all formats of pairs, as a seq2seq recipe writes them."""
    pair_types = (Pair, SourceWithReferences)
    names = [name for name in FORMATS.names() if issubclass(FORMATS.get(name).example_type, pair_types)]
    return [name.removeprefix(PAIR_PREFIX) for name in names]


def reader_options(format: str) -> list[str]:
    """Return the columns and options of a format."""
    return get_format(format).options


def has_splits(format: str, path: str | Path) -> bool:
    """Return whether a path contains several splits in this format."""
    return get_format(format).has_splits(Path(path))


_TABLE_FILES = SplitFiles(suffixes=tuple(table.SUFFIXES))
_JSONL_FILES = SplitFiles(suffixes=(".jsonl", ".ndjson", ".json", ".parquet"))
_JSON_FILES = SplitFiles(suffixes=(".json",))
_TSV_FILES = SplitFiles(suffixes=(".tsv",))
_CSV_FILES = SplitFiles(suffixes=(".csv",))
_CONLL_FILES = SplitFiles(suffixes=(".conll", ".txt", ".bio", ".iob", ".tsv", ".annotated", ""))


def _register_text_formats() -> None:
    def register(name: str, reader: Reader, description: str, files: SplitFiles, takes_split: bool = False) -> None:
        FORMATS.register(name, DatasetFormat(TextExample, reader, description, files, reader_takes_split=takes_split))

    register(
        "table", table.read_labeled, "labeled texts in CSV, TSV, JSON lines or Parquet, by the file name", _TABLE_FILES
    )
    descriptions = {"csv": "CSV with named columns", "tsv": "TSV without quoting", "jsonl": "JSON lines or a JSON list"}
    descriptions |= {"parquet": "Parquet, or a folder of Hugging Face datasets"}
    for file_type, description in descriptions.items():
        suffixes = tuple(suffix for suffix, suffix_type in table.SUFFIXES.items() if suffix_type == file_type)
        reader = partial(table.read_labeled, file_type=file_type)
        register(file_type, reader, f"labeled texts in {description}", SplitFiles(suffixes=suffixes))
    for name, task in glue.TASKS.items():
        files = SplitFiles(task.files, task.folders)
        register(f"glue:{name}", partial(glue.read, task=name), f"GLUE: {task.description}", files)
    banking77 = partial(table.read_labeled, text="text", label="category")
    register("banking77", banking77, "intents of bank customers", _CSV_FILES)
    clinc_files = SplitFiles({"train": ("data_full.json",)})
    register("clinc", clinc_goemotions.read_clinc, "CLINC150: intents, some out of scope", clinc_files, True)
    register("goemotions", clinc_goemotions.read_goemotions, "several emotions per text", _TSV_FILES)
    register("restaurant8k", clinc_goemotions.read_restaurant8k, "slot spans in dialog turns", _JSON_FILES)


def _register_other_formats() -> None:
    def register(name: str, example_type: type, reader: Reader, description: str, files: SplitFiles) -> None:
        FORMATS.register(name, DatasetFormat(example_type, reader, description, files))

    for name, task in superglue.TASKS.items():
        reader = partial(superglue.read, task=name)
        files = SplitFiles(task.files, (name,))
        register(f"superglue:{name}", task.example_type, reader, f"SuperGLUE: {task.description}", files)
    register("conll", TaggedExample, conll.read, "CoNLL: one word per line with its tags", _CONLL_FILES)
    register(
        "words", TaggedExample, conll.read_jsonl, "lists of words and their tags in JSON lines or Parquet", _JSONL_FILES
    )
    conllu_files = SplitFiles(suffixes=(".conllu",))
    register("conllu", TaggedExample, conll.read_conllu, "CoNLL-U of Universal Dependencies", conllu_files)
    register("squad", QAExample, squad.read, "SQuAD 1.1 and 2.0", _JSON_FILES)
    register("questions", QAExample, squad.read_jsonl, "questions with contexts in JSON lines or Parquet", _JSONL_FILES)
    register("choices", MultipleChoiceExample, choices.read_table, "multiple choice in a table", _TABLE_FILES)
    register("swag", MultipleChoiceExample, choices.read_swag, "SWAG's CSV", _CSV_FILES)
    register("arc", MultipleChoiceExample, choices.read_arc, "ARC's JSON lines", _JSONL_FILES)
    register("commonsense_qa", MultipleChoiceExample, choices.read_arc, "CommonsenseQA's JSON lines", _JSONL_FILES)
    register("idx", ImageExample, images.read_idx, "images in MNIST's idx files", images.IDX_FILES)
    image_format = DatasetFormat(
        ImageExample,
        images.read_images,
        "image files: one folder per class, or paths in a table",
        reader_takes_split=True,
        has_splits=images.has_splits,
    )
    FORMATS.register("images", image_format)


def _register_pair_formats() -> None:
    def register(name: str, reader: Reader, description: str, files: SplitFiles, example_type: type = Pair) -> None:
        FORMATS.register(name, DatasetFormat(example_type, reader, description, files))

    aligned = "source and target in two files, line by line"
    FORMATS.register("aligned", DatasetFormat(Pair, pairs.read_aligned, aligned, second_file_option="targets"))
    register(f"{PAIR_PREFIX}tsv", pairs.read_tsv, "source, tab, target, without a header", _TSV_FILES)
    register(f"{PAIR_PREFIX}jsonl", pairs.read_jsonl, "source and target in JSON lines", _JSONL_FILES)
    register("cmudict", pairs.read_cmudict, "CMU Pronouncing Dictionary", SplitFiles(suffixes=(".dict", ".txt", "")))
    register("parallel", pairs.read_parallel, "source and target in a table", _TABLE_FILES)
    summaries = "documents and summaries in a table"
    register("summaries", pairs.read_summaries, summaries, _TABLE_FILES, SourceWithReferences)
    register("scitldr", pairs.read_scitldr, "SciTLDR's JSON lines", _JSONL_FILES, SourceWithReferences)


_register_text_formats()
_register_other_formats()
_register_pair_formats()
