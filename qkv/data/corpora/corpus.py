"""Read the documents of a corpus one by one: plain text, JSON lines, Parquet, folders and Hugging Face datasets.

Files are UTF-8, plain or compressed (.gz, .zst, by the file name); a byte order mark and Windows line ends are
accepted. Errors name the file and the line (the row for Parquet and datasets).
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from qkv.data.compression import INSTALL_HINT, decompressed_lines
from qkv.data.corpora.sentence_split import sentence_ends
from qkv.data.formats.fields import parse_json_object, string_field
from qkv.data.formats.io import decode_line
from qkv.errors import InputError, did_you_mean, quote
from qkv.files import open_file, os_error
from qkv.limits import limit, raise_hint

FORMATS = ("line_per_document", "blank_line_separated", "file_per_document", "jsonl", "parquet")
DATASETS_PREFIX = "datasets:"
PYTHON_TOPICS = "python:topics"
# possible formats of a file in a folder by its suffix; a .json file contains JSON lines
_FORMATS_BY_SUFFIX = {".txt": FORMATS[:3], ".jsonl": ("jsonl",), ".ndjson": ("jsonl",), ".json": ("jsonl",)}
_FORMATS_BY_SUFFIX |= {".parquet": ("parquet",)}
_COMPRESSED = (".gz", ".zst")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Document:
    """A text with the location ("file:line") it was read from."""

    text: str
    location: str
    line_is_sentence: bool = False  # each line is one sentence

    @property
    def sentences(self) -> list[str]:
        """The sentences of the text, which concatenated give the text: white space is at the start of the next one."""
        if self.line_is_sentence:
            first, *rest = self.text.split("\n")
            return [first, *(f"\n{line}" for line in rest)]
        ends = sentence_ends(self.text)
        return [self.text[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """A file or the name of a dataset, with its format and size in bytes."""

    name: str
    format: str
    size: int


class Corpus:
    """The documents of files, folders and datasets; each iteration starts at the first one.

    `format` is one of:
    - line_per_document: one document per line;
    - blank_line_separated: blank lines separate documents, and each line is a sentence;
    - file_per_document: one document per file, with arbitrary line breaks;
    - jsonl: one object per line, with the text in `text_field`;
    - parquet: one document per row, with the text in the column `text_field`.
    By default it is inferred from the suffix; a .txt file needs one of the first three. In a folder and its subfolders,
    the visible files with a suffix of the format are read, sorted by path. "datasets:NAME", "datasets:NAME:SPLIT" and
    "datasets:NAME@CONFIGURATION:SPLIT" are streamed Hugging Face datasets. "python:topics" are the topics of Python's
    documentation, which every installation has. Blank documents are skipped.
    """

    def __init__(self, paths: Iterable[str | Path], *, format: str | None = None, text_field: str = "text") -> None:
        if format is not None and format not in FORMATS:
            raise InputError(f"corpus format '{format}' is unknown; {did_you_mean(format, FORMATS)}")
        self.text_field = text_field
        self.files = [file for path in paths for file in _find_files(path, format)]
        if not self.files:
            raise InputError("no files to read; give at least one")
        self.size = sum(file.size for file in self.files)
        self._bytes_done = 0  # bytes of the files that are finished
        self._file: BinaryIO | None = None  # the file that is being read

    def __iter__(self) -> Iterator[Document]:
        self._bytes_done = 0
        for file in self.files:
            yield from (document for document in self._read_file(file) if document.text.strip())
            self._file = None
            self._bytes_done += file.size

    @property
    def bytes_read(self) -> int:
        """Number of (compressed) bytes that the current iteration has read."""
        is_open = self._file is not None and not self._file.closed and self._file.seekable()
        return self._bytes_done + (self._file.tell() if is_open and self._file is not None else 0)

    def manifest(self) -> dict[str, Any]:
        """Return the files and settings that determine the documents."""
        return {"files": [asdict(file) for file in self.files], "text_field": self.text_field}

    def _read_file(self, file: CorpusFile) -> Iterator[Document]:
        readers: dict[str, Callable[[CorpusFile], Iterator[Document]]] = {
            "line_per_document": self._read_lines,
            "blank_line_separated": self._read_blank_separated,
            "file_per_document": self._read_whole_file,
            "jsonl": self._read_jsonl,
            "parquet": self._read_parquet,
            "datasets": self._read_hf_dataset,
            "topics": _read_python_topics,
        }
        return readers[file.format](file)

    def _read_lines(self, file: CorpusFile) -> Iterator[Document]:
        return (Document(line, f"{file.name}:{number}") for number, line in self._iter_lines(file))

    def _read_blank_separated(self, file: CorpusFile) -> Iterator[Document]:
        lines: list[str] = []
        first_line = num_chars = 0
        for number, line in self._iter_lines(file):
            if line.strip():
                first_line = first_line if lines else number
                num_chars = num_chars + len(line) if lines else len(line)
                _check_document(num_chars, f"{file.name}:{first_line}")
                lines.append(line)
            elif lines:
                yield Document("\n".join(lines), f"{file.name}:{first_line}", line_is_sentence=True)
                lines = []
        if lines:
            yield Document("\n".join(lines), f"{file.name}:{first_line}", line_is_sentence=True)

    def _read_whole_file(self, file: CorpusFile) -> Iterator[Document]:
        lines: list[str] = []
        num_chars = 0
        for _, line in self._iter_lines(file):
            num_chars += len(line) + 1
            _check_document(num_chars, file.name)
            lines.append(line)
        yield Document("\n".join(lines), f"{file.name}:1")

    def _read_jsonl(self, file: CorpusFile) -> Iterator[Document]:
        for number, line in self._iter_lines(file):
            if line.strip():
                location = f"{file.name}:{number}"
                record = parse_json_object(line, location, f'{{"{self.text_field}": …}}')
                yield Document(string_field(record, self.text_field, location), location)

    def _read_parquet(self, file: CorpusFile) -> Iterator[Document]:
        try:
            pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        except ImportError:
            raise InputError(f"{file.name}: Parquet needs the package pyarrow: {INSTALL_HINT}") from None
        row = 0
        try:
            with open_file(file.name) as self._file, parquet.ParquetFile(self._file) as parquet_file:
                names = parquet_file.schema_arrow.names
                if self.text_field not in names:
                    hint = did_you_mean(self.text_field, names)
                    raise InputError(f"{file.name}: no column '{self.text_field}'; {hint}")
                for batch in parquet_file.iter_batches(columns=[self.text_field]):
                    for value in batch.column(0).to_pylist():
                        row += 1
                        location = f"{file.name}:{row}"
                        yield Document(string_field({self.text_field: value}, self.text_field, location), location)
        except OSError as problem:  # pyarrow also raises it for damaged files
            raise InputError(f"{file.name}:{row + 1}: cannot read on ({_first_line(problem)}); copy it again") from None
        except (pyarrow.ArrowException, UnicodeDecodeError) as problem:
            reason = f"damaged Parquet ({_first_line(problem)}); copy it again"
            raise InputError(f"{file.name}:{row + 1}: {reason}") from None

    def _read_hf_dataset(self, file: CorpusFile) -> Iterator[Document]:
        try:
            datasets = import_module("datasets")
        except ImportError:
            raise InputError(f"{file.name}: needs the package datasets: pip install 'qkv[datasets]'") from None
        dataset_id, _, split = file.name.removeprefix(DATASETS_PREFIX).partition(":")
        name, _, config_name = dataset_id.partition("@")
        row = 0
        try:
            dataset = datasets.load_dataset(name, config_name or None, split=split or "train", streaming=True)
            for row, record in enumerate(dataset, 1):
                location = f"{file.name}:{row}"
                yield Document(string_field(record, self.text_field, location), location)
        except InputError:
            raise
        except Exception as problem:  # the libraries for downloads and file formats raise many classes
            raise InputError(f"{file.name}:{row + 1}: cannot be read ({_first_line(problem)})") from None

    def _iter_lines(self, file: CorpusFile) -> Iterator[tuple[int, str]]:
        """Yield the number and the text of each line, without its line end."""
        number = 0
        try:
            with open_file(file.name) as self._file:
                for number, raw in enumerate(decompressed_lines(self._file, file.name), 1):
                    line = raw.removeprefix(_BYTE_ORDER_MARK) if number == 1 else raw
                    yield number, decode_line(line.removesuffix(b"\n").removesuffix(b"\r"), f"{file.name}:{number}")
        except (gzip.BadGzipFile, EOFError, zlib.error):
            suffix = Path(file.name).suffix.lower()
            reason = f"the {suffix} file is broken or ends early here; copy it again"
            raise InputError(f"{file.name}:{number + 1}: {reason}") from None
        except OSError as problem:
            reason = f"cannot read on ({problem.strerror}); give a readable file"
            raise InputError(f"{file.name}:{number + 1}: {reason}") from None


def _find_files(path: str | Path, format: str | None) -> Iterator[CorpusFile]:
    name = str(path)
    if name.startswith(DATASETS_PREFIX):
        yield CorpusFile(name, "datasets", 0)
        return
    if name == PYTHON_TOPICS:
        yield CorpusFile(name, "topics", 0)
        return
    root = Path(path)
    if not os.path.isdir(root):
        yield _make_corpus_file(root, format or _infer_format(root))
        return
    # without a format, all known suffixes are included, so that a .txt file leads to an error instead of being skipped
    files = [file for file in _visible_files(root) if _matches_format(file, format)]
    if not files:
        suffixes = [suffix for suffix, formats in _FORMATS_BY_SUFFIX.items() if format is None or format in formats]
        raise InputError(f"{root}: no file with the suffix {', '.join(suffixes)}; give the files instead of the folder")
    for file in sorted(files, key=lambda file: file.relative_to(root).parts):
        yield _make_corpus_file(file, format or _infer_format(file))


def _visible_files(root: Path) -> Iterator[Path]:
    for path in root.rglob("*"):
        is_hidden = any(name.startswith(".") for name in path.relative_to(root).parts)
        if not is_hidden and os.path.isfile(path):
            yield path


def _matches_format(file: Path, format: str | None) -> bool:
    formats = _possible_formats(file)
    return bool(formats) if format is None else format in formats


def _read_python_topics(file: CorpusFile) -> Iterator[Document]:
    from pydoc_data.topics import topics

    return (Document(topics[name], f"{file.name}:{name}") for name in sorted(topics))


def _make_corpus_file(path: Path, format: str) -> CorpusFile:
    try:
        return CorpusFile(str(path), format, path.stat().st_size)
    except (OSError, ValueError) as error:
        raise os_error(path, error) from None


def _possible_formats(path: Path) -> tuple[str, ...]:
    inner = path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path
    return _FORMATS_BY_SUFFIX.get(inner.suffix.lower(), ())


def name_implies_format(name: str | Path) -> bool:
    """Return whether the format follows from the file name."""
    return len(_possible_formats(Path(name))) == 1


def _infer_format(path: Path) -> str:
    formats = _possible_formats(path)
    if len(formats) == 1 or not os.path.exists(path):
        return formats[0] if formats else FORMATS[0]
    options = f"{FORMATS[0]}, {FORMATS[1]} or {FORMATS[2]}"
    raise InputError(f"{path}: the file name does not determine the format; give the format: {options}")


def _check_document(num_chars: int, location: str) -> None:
    if num_chars > limit("document_bytes"):
        raise InputError(f"{location}: the document has too many bytes; {raise_hint('document_bytes')}")


def _first_line(problem: BaseException) -> str:
    """Return the first line of an exception's message."""
    return quote((str(problem).strip() or type(problem).__name__).splitlines()[0], 100)[1:-1]
