"""CoNLL's columns, a word a line and a blank line between sentences: tags of CoNLL-2000 to 2003 and what is written
like them (WNUT), and CoNLL-U of Universal Dependencies.

A sentence with one bad line is bad as a whole. Chunk tags are checked against their scheme, and IOB1 comes out as BIO.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from qkv.data.examples import Tagged
from qkv.data.tags import SCHEMES, bio_from_iob1, breach, scheme_of
from qkv.data.tasks.fields import texts_field
from qkv.data.tasks.lines import Bad, blocks, decoded, objects
from qkv.errors import InputError, nearest

_DOCUMENT = b"-DOCSTART-"
_COLUMNS = {1: ("word",), 2: ("word", "tag"), 3: ("word", "pos", "tag"), 4: ("word", "pos", "chunk", "ner")}
UNIVERSAL = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
_ID = re.compile(r"(?P<word>\d{1,9})(?:-(?P<last>\d{1,9})|(?P<empty>\.\d+))?")
_UNSET = "_"
_LOOKED_AT = 1000  # sentences that tell how many columns a file has
_PLAIN = "NONE"  # tags that mark no chunks
_TOLD = "as the tags tell"  # not None, which the command line has for "none"


@dataclass(frozen=True, slots=True)
class _Sentence:
    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    places: tuple[str, ...]  # of each word


def read(path: Path, bad: Bad, *, tag: str | None = None, scheme: str | None = _TOLD) -> Iterator[Tagged]:
    """Sentences with the tags of one column: "pos", "chunk" or "ner" of four, else a number from 1; the last one
    without it.

    `scheme` is BIO, IOB1, BIOES, or "none" or None for tags that are no chunks; without it the file's tags tell.
    """
    yield from _checked(list(_sentences(path, bad, tag)), bad, scheme)


def listed(
    path: Path, bad: Bad, *, words: str = "words", tags: str | None = "tags", scheme: str | None = _TOLD
) -> Iterator[Tagged]:
    """Sentences out of JSON lines with a list of words and one of tags; the scheme as of `read`."""
    yield from _checked(list(_records(path, bad, words, tags)), bad, scheme)


def _records(path: Path, bad: Bad, words: str, tags: str | None) -> Iterator[_Sentence]:
    for where, record in objects(path, bad, f'{{"{words}": ["…", …], "{tags}": ["…", …]}}'):
        with bad:
            given = texts_field(record, words, where)
            known = None if tags is None else texts_field(record, tags, where)
            if not given or not all(word.strip() for word in given):
                raise InputError(f"{where}: an empty word in '{words}', or none at all; repair the record")
            if known is not None and len(known) != len(given):
                raise InputError(f"{where}: {len(given)} words have {len(known)} tags; give each word one")
            yield _Sentence(given, known, (where,) * len(given))


def _checked(sentences: list[_Sentence], bad: Bad, scheme: str | None) -> Iterator[Tagged]:
    wanted: str | None = (scheme or _PLAIN).upper()
    if scheme == _TOLD:
        wanted = scheme_of(one.tags for one in sentences if one.tags is not None)
    if wanted is not None and wanted not in (*SCHEMES, _PLAIN):
        raise InputError(f"tag scheme '{scheme}' is unknown; {nearest(wanted, (*SCHEMES, _PLAIN))}")
    for sentence in sentences:
        with bad:
            tags = sentence.tags
            if tags is not None and wanted not in (None, _PLAIN):
                tags = _in_scheme(tags, str(wanted), sentence.places)
            text, starts = spaced(sentence.words)
            yield Tagged(text, sentence.words, starts, tags, sentence.places[0])


def _in_scheme(tags: tuple[str, ...], scheme: str, places: Sequence[str]) -> tuple[str, ...]:
    found = breach(tags, scheme)
    if found is not None:
        number, said = found
        raise InputError(f"{places[number]}: {said}; correct the tag, or name the file's own scheme")
    return bio_from_iob1(tags) if scheme == "IOB1" else tags


def _sentences(path: Path, bad: Bad, tag: str | None) -> Iterator[_Sentence]:
    every = blocks(path)
    first = list(islice(every, _LOOKED_AT))  # not read twice: what is named may be a pipe
    count = _columns(first)
    for block in chain(first, every):
        kept = [(where, raw) for where, raw in block if not raw.startswith(_DOCUMENT)]
        if not kept:
            continue
        with bad:
            fields = [(where, _fields(decoded(raw, where))) for where, raw in kept]
            place = _place(tag, count, fields[0][0])
            for where, found in fields:
                if len(found) != count or not all(field.strip() for field in found):
                    given = f"{len(found)} column{'s' * (len(found) > 1)}" if len(found) != count else "an empty column"
                    raise InputError(f"{where}: {given} where the file has {count}; repair the line")
            tags = None if place is None else tuple(found[place] for _, found in fields)
            yield _Sentence(tuple(found[0] for _, found in fields), tags, tuple(where for where, _ in fields))


def _columns(first: list[list[tuple[str, bytes]]]) -> int:
    """How many most of a file's first lines have: one that is bad must not speak for all."""
    some = (raw for block in first for _, raw in block if not raw.startswith(_DOCUMENT))
    counts = Counter(len(_fields(raw.decode("utf-8", "replace"))) for raw in some)
    return counts.most_common(1)[0][0] if counts else 0


def _fields(line: str) -> list[str]:
    """Tabs part the columns where there is one, else spaces; other white space may be a word."""
    return line.split("\t") if "\t" in line else [field for field in line.split(" ") if field]


def _place(tag: str | None, count: int, where: str) -> int | None:
    """The number of the column of the tags; None where the words have none."""
    if tag is None:
        return count - 1 if count > 1 else None
    names = _COLUMNS.get(count, ())
    if tag in names:
        return names.index(tag)
    if tag.isdecimal() and 1 <= int(tag) <= count:
        return int(tag) - 1
    known = ", ".join([*names, f"1 to {count}"])
    raise InputError(f"{where}: no column '{tag}'; the columns are: {known}")


def spaced(words: Sequence[str], glued: Sequence[bool] = ()) -> tuple[str, tuple[int, ...]]:
    """The words as a text, and where in it they start: a space before each but the first and those that are glued."""
    starts, text = [], ""
    for number, word in enumerate(words):
        text += "" if not number or (glued and glued[number]) else " "
        starts.append(len(text))
        text += word
    return text, tuple(starts)


# ---- CoNLL-U --------------------------------------------------------------------------------------------------------


def universal(path: Path, bad: Bad, *, tag: str = "upos") -> Iterator[Tagged]:
    """Sentences of CoNLL-U with the tags of a column: upos, xpos, feats, lemma, deprel, …

    The syntactic words are the words: a range ("1-2 don't") only says how they are written, an empty node ("8.1") is
    left out. The text has spaces where the file says that there were some.
    """
    if tag not in UNIVERSAL:
        raise InputError(f"{path}: no column '{tag}'; the columns are: {', '.join(UNIVERSAL)}")
    column = UNIVERSAL.index(tag)
    for block in blocks(path):
        with bad:
            said = [(where, decoded(raw, where)) for where, raw in block]
            names = [line.partition("=")[2].strip() for _, line in said if re.match(r"#\s*sent_id\s*=", line)]
            records = [(where, _record(line, where)) for where, line in said if not line.startswith("#")]
            words = _words(records)
            if not words:  # comments between sentences
                continue
            tags = tuple(_filled(record[column], tag, where) for where, record in words)
            forms = tuple(record[1] for _, record in words)
            text, starts = spaced(forms, _glued(records))
            unset = all(one == _UNSET for one in tags) and tag in ("upos", "xpos", "lemma", "deprel")
            yield Tagged(text, forms, starts, None if unset else tags, words[0][0], names[0] if names else "")


def _filled(value: str, name: str, where: str) -> str:
    if not value.strip():
        raise InputError(f"{where}: the column '{name}' is empty here; fill it in, with {_UNSET} if there is nothing")
    return value


Record = tuple[str, list[str]]  # a place and the ten columns


def _record(line: str, where: str) -> list[str]:
    columns = line.split("\t")
    if len(columns) != len(UNIVERSAL):
        raise InputError(f"{where}: {len(columns)} columns where CoNLL-U has {len(UNIVERSAL)}, parted by tabs")
    if not _ID.fullmatch(columns[0]):
        raise InputError(f"{where}: id '{columns[0]}' is no word (1), range (1-2) or empty node (1.1) of CoNLL-U")
    if not columns[1].strip():
        raise InputError(f"{where}: the word is empty; fill in the second column")
    return columns


def _words(records: Sequence[Record]) -> list[Record]:
    words = [record for record in records if record[1][0].isdecimal()]
    for number, (where, columns) in enumerate(words, 1):
        if int(columns[0]) != number:
            raise InputError(f"{where}: word {columns[0]} where {number} should come; number the words from 1 on")
    return words


def _glued(records: Sequence[Record]) -> list[bool]:
    """Whether each word stands without a space behind the one before it."""
    forms = {int(columns[0]): columns[1] for _, columns in records if columns[0].isdecimal()}
    after = dict.fromkeys(forms, False)  # no space behind the word
    ranges: list[tuple[int, int]] = []
    for where, columns in records:
        said, apart = _ID.fullmatch(columns[0]), "SpaceAfter=No" not in columns[9].split("|")
        assert said is not None  # `_record` has refused it
        if said["empty"]:
            continue
        first, last = int(said["word"]), int(said["last"] or said["word"])
        if not 1 <= first <= last <= len(forms):
            raise InputError(f"{where}: the range {columns[0]} is not among the {len(forms)} words of its sentence")
        if said["last"]:
            ranges.append((first, last))
            # "zum" is not "zu" and "dem": only words that make up what was written are written together.
            joined = "".join(forms[number] for number in range(first, last + 1)) == columns[1]
            after |= dict.fromkeys(range(first, last), joined) | {last: not apart}
        elif not any(begin <= first <= end for begin, end in ranges):
            after[first] = not apart
    return [False, *(after[number] for number in range(1, len(forms)))]
