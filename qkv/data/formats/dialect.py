"""Detection of the encoding of a text file and of the delimiter of a table.

Encoding: a byte order mark decides (UTF-8, UTF-16, UTF-32). Without one, a file is UTF-8 if it has no more bytes that
are not UTF-8 than characters that are: single bad bytes are reported by line. Any other file is Windows-1252, which
contains the characters of Latin-1, if it then reads like a Western European text; else it is refused, since 8-bit
encodings cannot be told apart.

Delimiter: that of the file's type (comma, or tab for TSV) if the header then has the columns in use; else the one of
`DELIMITERS` whose header has them; else the one that divides nearly all records into the same number of fields.
"""

from __future__ import annotations

import codecs
import csv
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from qkv.errors import InputError, quote

TAB = "\t"
DELIMITERS = (",", ";", TAB, "|")
_DELIMITER_NAMES = {"tab": TAB, "\\t": TAB, "comma": ",", "semicolon": ";", "pipe": "|"}
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark is a prefix of this one
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
UTF8 = "utf-8"
WESTERN = "cp1252"
_NON_ASCII = re.compile(r"[^\x00-\x7f]")
_BAD_BYTE = re.compile("[\udc80-\udcff]")
_LETTER = re.compile(r"[^\W\d_]")
# a symbol between two letters, which is rare in the languages of Windows-1252, unlike a quotation mark or a dash
_SYMBOL_IN_WORD = re.compile(r"(?<=[^\W\d_])[¡-©«-¹»-¿ˆ˜€‰†‡•™\x80-\x9f](?=[^\W\d_])")
_MAX_NON_ASCII_LETTERS = 0.3  # of all letters in a Western European text
_MAX_SYMBOLS_IN_WORDS = 0.05  # of all characters that are not ASCII
_MIN_CONSISTENT = 0.9  # of the records that have the most frequent number of fields


class RememberedDelimiter(str):
    """The delimiter of a run's own files; for another file it holds only if that then has the columns in use."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Dialect:
    """The delimiter of a table, and whether quotation marks enclose fields."""

    delimiter: str
    quoted: bool = True


def normalize_delimiter(delimiter: str) -> str:
    r"""Return a delimiter given by a user, who may write "tab" or "\t"."""
    delimiter = _DELIMITER_NAMES.get(delimiter, delimiter)
    if len(delimiter) != 1 or delimiter in '"\r\n\0':
        raise InputError(f"delimiter {quote(delimiter)}: is one character, such as ';', or the word tab")
    return str(delimiter)


def normalize_encoding(encoding: str) -> str:
    """Return the name of an encoding given by a user, as Python's codecs spell it."""
    try:
        info = codecs.lookup(encoding)
        "a".encode(info.name).decode(info.name)  # "base64" and "rot13" are codecs, but no encodings of text
    except (LookupError, ValueError, TypeError):
        raise InputError(
            f"encoding {quote(encoding)}: is unknown; known are utf-8, latin-1, cp1252, utf-16, gb18030 and others"
        ) from None
    return {"utf-8-sig": UTF8, "iso8859-1": "latin-1"}.get(info.name, info.name)


def encoding_by_mark(sample: bytes) -> tuple[str, bytes] | None:
    """Return the encoding that the byte order mark of a file tells, and the mark; None without one."""
    return next(((encoding, mark) for mark, encoding in _MARKS if sample.startswith(mark)), None)


def detect_encoding(sample: bytes, name: str) -> str | None:
    """Return the encoding of the first bytes of a file without a byte order mark; None if they are ASCII.

    Args:
        sample: whole lines from the beginning of the file.
        name: the file's name in messages.
    """
    if sample.isascii():
        return None
    text = sample.decode("utf-8", "surrogateescape")
    num_bad = len(_BAD_BYTE.findall(text))
    if b"\0" in sample or 2 * num_bad <= len(_NON_ASCII.findall(text)):
        return UTF8
    if not _is_western(sample):
        raise InputError(f"{name}: is neither UTF-8 nor Western European text; give its encoding, such as cp1251")
    return WESTERN


def is_utf8(sample: bytes) -> bool:
    """Return whether bytes are valid UTF-8 and not all ASCII, which text in another encoding practically never is."""
    try:
        sample.decode(UTF8)
    except UnicodeDecodeError:
        return False
    return not sample.isascii()


def _is_western(sample: bytes) -> bool:
    """Return whether bytes, read as Windows-1252, look like a Western European text."""
    try:
        text = sample.decode(WESTERN)
    except UnicodeDecodeError:
        return False
    letters = _LETTER.findall(text)
    num_non_ascii_letters = sum(not letter.isascii() for letter in letters)
    num_symbols = len(_SYMBOL_IN_WORD.findall(text))
    return num_non_ascii_letters <= max(
        2, _MAX_NON_ASCII_LETTERS * len(letters)
    ) and num_symbols <= _MAX_SYMBOLS_IN_WORDS * len(_NON_ASCII.findall(text))


def detect_dialect(lines: Sequence[str], file_delimiter: str, required: Collection[str], header: bool) -> Dialect:
    """Return the dialect of a table.

    Args:
        lines: the first lines of the file.
        file_delimiter: the delimiter of the file's type: a comma, or a tab for TSV, which has no quoting.
        required: the columns in use; numbers from 1 without a header.
        header: whether the first record has the names of the columns.
    """
    candidates = [Dialect(file_delimiter, file_delimiter != TAB)]
    candidates += [_other_dialect(lines, delimiter) for delimiter in DELIMITERS if delimiter != file_delimiter]
    if header and required:
        for dialect in candidates:
            if has_columns(lines, dialect, required, header):
                return dialect
    min_fields = 2 if header else max((int(name) for name in required if name.isdecimal()), default=2)
    shares = {dialect: _consistency(_parse(lines, dialect), max(2, min_fields)) for dialect in candidates}
    best = max(candidates, key=lambda dialect: shares[dialect])
    consistent = shares[candidates[0]] >= _MIN_CONSISTENT or shares[best] < _MIN_CONSISTENT
    return candidates[0] if consistent else best


def has_columns(lines: Sequence[str], dialect: Dialect, required: Collection[str], header: bool) -> bool:
    """Return whether the first record has the names of the columns in use or, without a header, enough fields."""
    fields = next(iter(_parse(lines, dialect)), [])
    names = [name.strip() for name in fields] if header else [str(number + 1) for number in range(len(fields))]
    return set(names).issuperset(required)


def count_unnamed_columns(lines: Sequence[str], dialect: Dialect, num_columns: int) -> int:
    """Return the number of columns after those of the header: at least half of the records fill as many fields."""
    records = _parse(lines, dialect)[1:]
    widths = Counter(len(record) for record in records if any(map(str.strip, record[num_columns:])))
    if not widths:
        return 0
    width, frequency = widths.most_common(1)[0]
    return width - num_columns if 2 * frequency >= len(records) else 0


def _other_dialect(lines: Sequence[str], delimiter: str) -> Dialect:
    """Return the dialect of a delimiter that is not the file type's; a table with tabs may have no quoting."""
    if delimiter != TAB:
        return Dialect(delimiter)
    records = _parse(lines, Dialect(delimiter), strict=True)
    return Dialect(delimiter, bool(records) and all(len(record) == len(records[0]) for record in records))


def _parse(lines: Sequence[str], dialect: Dialect, strict: bool = False) -> list[list[str]]:
    """Return the records of the first lines; with `strict`, none if they are not CSV. The last may be incomplete."""
    if not dialect.quoted:
        return [line.split(dialect.delimiter) for line in lines if line.strip()]
    records: list[list[str]] = []
    reader = csv.reader((f"{line}\n" for line in lines), delimiter=dialect.delimiter, strict=strict)
    try:
        records.extend(record for record in reader if record)
    except csv.Error:
        return [] if strict else records
    return records


def _consistency(records: Sequence[Sequence[str]], min_fields: int) -> float:
    """Return the share of the records that have the most frequent number of fields; 0 if those are too few."""
    counts = Counter(map(len, records))
    if not counts:
        return 0.0
    num_fields, frequency = counts.most_common(1)[0]
    return frequency / len(records) if num_fields >= min_fields else 0.0
