"""Documents of a corpus: plain text, JSON lines, Parquet, folders of them and Hugging Face datasets, one at a time.

Files are UTF-8, plain or packed (.gz, .zst, by the name's ending); a byte order mark and Windows line ends are
tolerated. What cannot be read is one line that names file and line (of Parquet and datasets: the row).
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from qkv.data.readers import json_object, text_field
from qkv.data.sentences import sentence_ends
from qkv.errors import InputError, nearest

FORMATS = ("lines", "blank", "whole", "jsonl", "parquet")
DATASETS = "datasets:"
TOPICS = "python:topics"
# Which formats a file in a folder may have, by its name's ending; a .json of a corpus holds JSON lines.
_ENDINGS = {".txt": ("lines", "blank", "whole"), ".jsonl": ("jsonl",), ".ndjson": ("jsonl",), ".json": ("jsonl",)}
_ENDINGS |= {".parquet": ("parquet",)}
_PACKED = (".gz", ".zst")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CHUNK = 2**18
_EXTRA = "pip install 'qkv[corpora]'"


@dataclass(frozen=True, slots=True)
class Document:
    """A text with the place ("file:line") that it came from."""

    text: str
    where: str
    by_line: bool = False  # a line of it is a sentence

    @property
    def sentences(self) -> list[str]:
        """The text cut into sentences, with no character lost: white space stands at the head of the next one."""
        if self.by_line:
            first, *rest = self.text.split("\n")
            return [first, *(f"\n{line}" for line in rest)]
        ends = sentence_ends(self.text)
        return [self.text[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


@dataclass(frozen=True, slots=True)
class Source:
    """A file, or a dataset's name, with its format and its size in bytes."""

    name: str
    format: str
    size: int


def documents(paths: Iterable[str | Path], *, format: str | None = None, field: str = "text") -> Iterator[Document]:
    """All documents of the paths, in order. See `Corpus`."""
    return iter(Corpus(paths, format=format, field=field))


class Corpus:
    """The documents of files, folders and datasets; each iteration begins at the first one.

    `format` says how documents stand in a file:
    - lines: a document a line;
    - blank: blank lines stand between documents, and a line is a sentence;
    - whole: a file is a document, with lines that end anywhere;
    - jsonl: an object a line, with the text in `field`;
    - parquet: a row each, with the text in the column `field`.
    Without it the name's ending decides, but never between the first three: a .txt needs to be told. Of a folder
    and those in it, the visible files that end as the format does are read, sorted by path. "datasets:NAME",
    "datasets:NAME:SPLIT" and "datasets:NAME@CONFIGURATION:SPLIT" are Hugging Face datasets, streamed.
    "python:topics" are the topics of Python's own documentation, which every installation has.
    Texts of nothing but white space are no documents.
    """

    def __init__(self, paths: Iterable[str | Path], *, format: str | None = None, field: str = "text") -> None:
        if format is not None and format not in FORMATS:
            raise InputError(f"corpus format '{format}' is unknown; {nearest(format, FORMATS)}")
        self.field = field
        self.sources = [source for path in paths for source in _find(path, format)]
        if not self.sources:
            raise InputError("no files to read; name at least one")
        self.size = sum(source.size for source in self.sources)
        self._done = 0  # bytes of the files that are read
        self._file: BinaryIO | None = None  # that is being read

    def __iter__(self) -> Iterator[Document]:
        self._done = 0
        for source in self.sources:
            yield from (document for document in self._read(source) if document.text.strip())
            self._file = None
            self._done += source.size

    @property
    def read(self) -> int:
        """Bytes of the files, packed as they are, that the last iteration has come to."""
        return self._done + (0 if self._file is None or self._file.closed else self._file.tell())

    def described(self) -> dict[str, Any]:
        """What decides which documents come."""
        return {"sources": [asdict(source) for source in self.sources], "field": self.field}

    def _read(self, source: Source) -> Iterator[Document]:
        readers: dict[str, Callable[[Source], Iterator[Document]]] = {
            "lines": self._one_a_line,
            "blank": self._between_blanks,
            "whole": self._whole,
            "jsonl": self._json_lines,
            "parquet": self._parquet,
            "datasets": self._dataset,
            "topics": _topics,
        }
        return readers[source.format](source)

    def _one_a_line(self, source: Source) -> Iterator[Document]:
        return (Document(line, f"{source.name}:{number}") for number, line in self._lines(source))

    def _between_blanks(self, source: Source) -> Iterator[Document]:
        lines: list[str] = []
        first = 0
        for number, line in self._lines(source):
            if line.strip():
                first = first if lines else number
                lines.append(line)
            elif lines:
                yield Document("\n".join(lines), f"{source.name}:{first}", by_line=True)
                lines = []
        if lines:
            yield Document("\n".join(lines), f"{source.name}:{first}", by_line=True)

    def _whole(self, source: Source) -> Iterator[Document]:
        yield Document("\n".join(line for _, line in self._lines(source)), f"{source.name}:1")

    def _json_lines(self, source: Source) -> Iterator[Document]:
        for number, line in self._lines(source):
            if line.strip():
                where = f"{source.name}:{number}"
                record = json_object(line, where, f'{{"{self.field}": …}}')
                yield Document(text_field(record, self.field, where), where)

    def _parquet(self, source: Source) -> Iterator[Document]:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise InputError(f"{source.name}: Parquet needs the package pyarrow: {_EXTRA}") from None
        row = 0
        try:
            with open(source.name, "rb") as self._file, parquet.ParquetFile(self._file) as opened:
                names = opened.schema_arrow.names
                if self.field not in names:
                    raise InputError(f"{source.name}: no column '{self.field}'; {nearest(self.field, names)}")
                for batch in opened.iter_batches(columns=[self.field]):
                    for value in batch.column(0).to_pylist():
                        row += 1
                        where = f"{source.name}:{row}"
                        yield Document(text_field({self.field: value}, self.field, where), where)
        except OSError as problem:  # what pyarrow says of damage may be one too
            raise InputError(f"{source.name}:{row + 1}: cannot read on ({_first(problem)}); copy it again") from None
        except (pyarrow.ArrowException, UnicodeDecodeError) as problem:
            raise InputError(f"{source.name}:{row + 1}: damaged Parquet ({_first(problem)}); copy it again") from None

    def _dataset(self, source: Source) -> Iterator[Document]:
        try:
            import datasets
        except ImportError:
            raise InputError(f"{source.name}: needs the package datasets: pip install 'qkv[datasets]'") from None
        whole, _, split = source.name.removeprefix(DATASETS).partition(":")
        name, _, configuration = whole.partition("@")
        row = 0
        try:
            opened = datasets.load_dataset(name, configuration or None, split=split or "train", streaming=True)
            for row, record in enumerate(opened, 1):
                where = f"{source.name}:{row}"
                yield Document(text_field(record, self.field, where), where)
        except InputError:
            raise
        except Exception as problem:  # of many classes, of as many libraries
            raise InputError(f"{source.name}:{row + 1}: cannot be read ({_first(problem)})") from None

    def _lines(self, source: Source) -> Iterator[tuple[int, str]]:
        """Each line without its end, after its number."""
        number = 0
        try:
            with open(source.name, "rb") as self._file:
                for number, raw in enumerate(unpacked(self._file, source.name), 1):
                    line = raw.removeprefix(_BYTE_ORDER_MARK) if number == 1 else raw
                    yield number, _decoded(line.removesuffix(b"\n").removesuffix(b"\r"), source.name, number)
        except (gzip.BadGzipFile, EOFError, zlib.error):
            kind = Path(source.name).suffix.lower()
            raise InputError(
                f"{source.name}:{number + 1}: the {kind} file is broken or ends early here; copy it again"
            ) from None
        except OSError as problem:
            said = f"cannot read on ({problem.strerror}); give a readable file"
            raise InputError(f"{source.name}:{number + 1}: {said}") from None


def _find(path: str | Path, format: str | None) -> Iterator[Source]:
    name = str(path)
    if name.startswith(DATASETS):
        yield Source(name, "datasets", 0)
        return
    if name == TOPICS:
        yield Source(name, "topics", 0)
        return
    place = Path(path)
    if not place.is_dir():
        yield _source(place, format or _told(place))
        return
    inside = (file for file in place.rglob("*") if not any(p.startswith(".") for p in file.relative_to(place).parts))
    # With no format, every ending that we know counts, so that a text which needs to be told is not passed over.
    files = [
        file for file in inside if file.is_file() and (_formats(file) if format is None else format in _formats(file))
    ]
    if not files:
        wanted = [ending for ending, formats in _ENDINGS.items() if format is None or format in formats]
        raise InputError(f"{place}: no file in it ends in {', '.join(wanted)}; name the files themselves")
    for file in sorted(files, key=lambda file: file.relative_to(place).parts):
        yield _source(file, format or _told(file))


def _topics(source: Source) -> Iterator[Document]:
    from pydoc_data.topics import topics

    return (Document(topics[name], f"{source.name}:{name}") for name in sorted(topics))


def _source(path: Path, format: str) -> Source:
    try:
        return Source(str(path), format, path.stat().st_size)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; check the path") from None
    except OSError as problem:
        raise InputError(f"{path}: cannot read it ({problem.strerror}); give a readable file") from None


def _formats(path: Path) -> tuple[str, ...]:
    inner = path.with_suffix("") if path.suffix.lower() in _PACKED else path
    return _ENDINGS.get(inner.suffix.lower(), ())


def tells(name: str | Path) -> bool:
    """Whether a name alone says how documents stand in the file."""
    return len(_formats(Path(name))) == 1


def _told(path: Path) -> str:
    formats = _formats(path)
    if len(formats) == 1 or not path.exists():
        return formats[0] if formats else FORMATS[0]
    told = "lines (a document a line), blank (blank lines between documents) or whole (a document a file)"
    raise InputError(f"{path}: its name does not tell where a document ends; give the format: {told}")


def _decoded(raw: bytes, name: str, number: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        said = f"not UTF-8 at byte {problem.start + 1} of the line"
        raise InputError(f"{name}:{number}: {said}; save the file as UTF-8") from None


def unpacked(file: BinaryIO, name: str) -> Iterable[bytes]:
    """Lines of a file that may be packed."""
    kind = Path(name).suffix.lower()
    if kind == ".gz":
        return gzip.GzipFile(fileobj=file)
    return file if kind != ".zst" else _split(_zst_chunks(file, name))


def _zst_chunks(file: BinaryIO, name: str) -> Iterator[bytes]:
    """What the frames of a zst file hold. An early end is an EOFError as gzip has it, where the library's own reader
    takes it for the end of the text."""
    try:
        import zstandard
    except ImportError:
        raise InputError(f"{name}: .zst needs the package zstandard: {_EXTRA}") from None
    frame = None
    while packed := file.read(_CHUNK):
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                yield frame.decompress(packed)
            except zstandard.ZstdError:
                raise EOFError from None
            packed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError


def _split(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines, each with its end."""
    rest: list[bytes] = []
    for chunk in chunks:
        *whole, last = chunk.split(b"\n")
        for line in whole:
            yield b"".join((*rest, line, b"\n"))
            rest = []
        rest.append(last)
    if any(rest):
        yield b"".join(rest)


def _first(problem: BaseException) -> str:
    """What a library says, in one line."""
    return (str(problem).strip() or type(problem).__name__).splitlines()[0]
