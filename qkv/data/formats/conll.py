"""Readers of tagged sentences: CoNLL columns (CoNLL-2000 to 2003, WNUT), CoNLL-U of Universal Dependencies, JSON lines.

A CoNLL file has one word per line and a blank line between sentences; one bad line makes the whole sentence bad. Chunk
tags are checked against their scheme, and IOB1 is converted to BIO.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from qkv.data.examples import TaggedExample
from qkv.data.formats.fields import require_field, strings_field
from qkv.data.formats.io import ErrorPolicy, decode_line, json_records, read_blocks
from qkv.data.formats.rows import Source
from qkv.data.tagging_schemes import SCHEMES, bio_from_iob1, detect_scheme, first_violation
from qkv.errors import InputError, did_you_mean, quote

_DOCSTART = b"-DOCSTART-"
_COLUMNS = {1: ("word",), 2: ("word", "tag"), 3: ("word", "pos", "tag"), 4: ("word", "pos", "chunk", "ner")}
CONLLU_COLUMNS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
_ID = re.compile(r"(?P<word>\d{1,9})(?:-(?P<last>\d{1,9})|(?P<empty>\.\d+))?")
_UNSET = "_"
_SNIFFED_SENTENCES = 1000  # sentences from which the number of columns is determined
_NO_SCHEME = "NONE"  # for tags that do not mark chunks
_INFER = "infer"  # not None, which is what "none" on the command line becomes


@dataclass(frozen=True, slots=True)
class _Sentence:
    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    locations: tuple[str, ...]  # one per word


def read(
    path: Path,
    error_policy: ErrorPolicy,
    *,
    tag: str | int | None = None,
    scheme: str | None = _INFER,
    encoding: str | None = None,
) -> Iterator[TaggedExample]:
    """Read sentences with the tags of one column.

    `tag` is "pos", "chunk" or "ner" in a file of four columns, or the number of a column from 1; by default the last
    column. `scheme` is BIO, IOB1 or BIOES, or "none" or None for tags that are not chunks; by default it is inferred
    from the tags.
    """
    tag_column = None if tag is None else str(tag)
    sentences = list(_read_sentences(path, error_policy, tag_column, encoding))
    yield from _to_examples(sentences, error_policy, scheme)


def read_jsonl(
    path: Source,
    error_policy: ErrorPolicy,
    *,
    words: str = "words",
    tags: str | None = "tags",
    scheme: str | None = _INFER,
) -> Iterator[TaggedExample]:
    """Read records with a list of words and a list of tags; `scheme` has the values it has in `read`."""
    yield from _to_examples(list(_read_jsonl_sentences(path, error_policy, words, tags)), error_policy, scheme)


def _read_jsonl_sentences(path: Source, error_policy: ErrorPolicy, words: str, tags: str | None) -> Iterator[_Sentence]:
    for location, record in json_records(path, error_policy, f'{{"{words}": ["…", …], "{tags}": ["…", …]}}'):
        with error_policy:
            word_list = strings_field(record, words, location)
            tag_list = None if tags is None else _tags_field(record, tags, location)
            if not word_list or not all(word.strip() for word in word_list):
                raise InputError(f"{location}: '{words}' is empty or contains an empty word; repair the record")
            if tag_list is not None and len(tag_list) != len(word_list):
                raise InputError(f"{location}: {len(word_list)} words have {len(tag_list)} tags; give one tag per word")
            yield _Sentence(word_list, tag_list, (location,) * len(word_list))


def _tags_field(record: Mapping[str, Any], name: str, location: str) -> tuple[str, ...]:
    """Return a list of tags; those that are indices of classes without names become texts."""
    values = require_field(record, name, location)
    if isinstance(values, list):
        are_indices = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
        record = {name: [str(value) for value in values]} if are_indices else record
    return strings_field(record, name, location)


def _to_examples(sentences: list[_Sentence], error_policy: ErrorPolicy, scheme: str | None) -> Iterator[TaggedExample]:
    scheme_name: str | None = (scheme or _NO_SCHEME).upper()
    if scheme == _INFER:
        scheme_name = detect_scheme(candidate.tags for candidate in sentences if candidate.tags is not None)
    if scheme_name is not None and scheme_name not in (*SCHEMES, _NO_SCHEME):
        raise InputError(f"tag scheme {quote(scheme)} is unknown; {did_you_mean(scheme_name, (*SCHEMES, _NO_SCHEME))}")
    for sentence in sentences:
        with error_policy:
            tags = sentence.tags
            if tags is not None and scheme_name not in (None, _NO_SCHEME):
                tags = _check_and_convert_tags(tags, str(scheme_name), sentence.locations)
            text, starts = join_words(sentence.words)
            yield TaggedExample(text, sentence.words, starts, tags, sentence.locations[0])


def _check_and_convert_tags(tags: tuple[str, ...], scheme: str, locations: Sequence[str]) -> tuple[str, ...]:
    violation = first_violation(tags, scheme)
    if violation is not None:
        number, message = violation
        raise InputError(f"{locations[number]}: {message}; correct the tag, or give the scheme of the file")
    return bio_from_iob1(tags) if scheme == "IOB1" else tags


def _read_sentences(
    path: Path, error_policy: ErrorPolicy, tag: str | None, encoding: str | None
) -> Iterator[_Sentence]:
    all_blocks = read_blocks(path, error_policy, encoding=encoding, detect=True)
    first = list(islice(all_blocks, _SNIFFED_SENTENCES))  # the file may be a pipe, which cannot be read twice
    num_columns = _detect_num_columns(first)
    for block in chain(first, all_blocks):
        lines = [(location, raw) for location, raw in block if not raw.startswith(_DOCSTART)]
        if not lines:
            continue
        with error_policy:
            rows = [(location, _split_columns(decode_line(raw, location))) for location, raw in lines]
            tag_column = _tag_column_index(tag, num_columns, rows[0][0])
            for location, columns in rows:
                if len(columns) != num_columns or not all(field.strip() for field in columns):
                    count = f"{len(columns)} column{'s' * (len(columns) > 1)}"
                    problem = count if len(columns) != num_columns else "an empty column"
                    raise InputError(f"{location}: {problem} where the file has {num_columns}; repair the line")
            tags = None if tag_column is None else tuple(columns[tag_column] for _, columns in rows)
            yield _Sentence(tuple(columns[0] for _, columns in rows), tags, tuple(location for location, _ in rows))


def _detect_num_columns(first: list[list[tuple[str, bytes]]]) -> int:
    """Return the most frequent number of columns in the first sentences, so that single bad lines do not matter."""
    raw_lines = (raw for block in first for _, raw in block if not raw.startswith(_DOCSTART))
    counts = Counter(len(_split_columns(raw.decode("utf-8", "replace"))) for raw in raw_lines)
    return counts.most_common(1)[0][0] if counts else 0


def _split_columns(line: str) -> list[str]:
    """Split at tabs if there is one, else at spaces; other white space can be part of a word."""
    return line.split("\t") if "\t" in line else [field for field in line.split(" ") if field]


def _tag_column_index(tag: str | None, num_columns: int, location: str) -> int | None:
    """Return the index of the column of tags; None if there are only words."""
    if tag is None:
        return num_columns - 1 if num_columns > 1 else None
    names = _COLUMNS.get(num_columns, ())
    if tag in names:
        return names.index(tag)
    if tag.isdecimal() and 1 <= int(tag) <= num_columns:
        return int(tag) - 1
    known = ", ".join([*names, f"1 to {num_columns}"])
    raise InputError(f"{location}: no column {quote(tag)}; the columns are: {known}")


def join_words(words: Sequence[str], no_space_before: Sequence[bool] = ()) -> tuple[str, tuple[int, ...]]:
    """Join words to a text and return it with the start of each word. `no_space_before` lists exceptions."""
    starts, text = [], ""
    for number, word in enumerate(words):
        text += "" if not number or (no_space_before and no_space_before[number]) else " "
        starts.append(len(text))
        text += word
    return text, tuple(starts)


# ---- CoNLL-U --------------------------------------------------------------------------------------------------------


def read_conllu(path: Path, error_policy: ErrorPolicy, *, tag: str = "upos") -> Iterator[TaggedExample]:
    """Read CoNLL-U with the tags of one column: upos, xpos, feats, lemma, deprel, …

    The words are the syntactic words: a range ("1-2 don't") only affects the spaces of the text, which follow
    `SpaceAfter=No`, and an empty node ("8.1") is left out.
    """
    if tag not in CONLLU_COLUMNS:
        raise InputError(f"{path}: no column '{tag}'; the columns are: {', '.join(CONLLU_COLUMNS)}")
    column = CONLLU_COLUMNS.index(tag)
    for block in read_blocks(path):
        with error_policy:
            lines = [(location, decode_line(raw, location)) for location, raw in block]
            sentence_ids = [line.partition("=")[2].strip() for _, line in lines if re.match(r"#\s*sent_id\s*=", line)]
            word_lines = [(location, line) for location, line in lines if not line.startswith("#")]
            records = [(location, _parse_conllu_row(line, location)) for location, line in word_lines]
            words = _syntactic_words(records)
            if not words:  # only comments
                continue
            tags = tuple(_check_filled(record[column], tag, location) for location, record in words)
            forms = tuple(record[1] for _, record in words)
            text, starts = join_words(forms, _no_space_before(records))
            is_unset = all(value == _UNSET for value in tags) and tag in ("upos", "xpos", "lemma", "deprel")
            sentence_id = sentence_ids[0] if sentence_ids else ""
            yield TaggedExample(text, forms, starts, None if is_unset else tags, words[0][0], sentence_id)


def _check_filled(value: str, name: str, location: str) -> str:
    if not value.strip():
        raise InputError(
            f"{location}: the column '{name}' is empty here; fill it in, with {_UNSET} if there is no value"
        )
    return value


ConlluRow = tuple[str, list[str]]  # location and the ten columns


def _parse_conllu_row(line: str, location: str) -> list[str]:
    columns = line.split("\t")
    if len(columns) != len(CONLLU_COLUMNS):
        raise InputError(
            f"{location}: {len(columns)} columns where CoNLL-U has {len(CONLLU_COLUMNS)}, separated by tabs"
        )
    if not _ID.fullmatch(columns[0]):
        raise InputError(
            f"{location}: id {quote(columns[0])} is not a word (1), range (1-2) or empty node (1.1) of CoNLL-U"
        )
    if not columns[1].strip():
        raise InputError(f"{location}: the word is empty; fill in the second column")
    return columns


def _syntactic_words(records: Sequence[ConlluRow]) -> list[ConlluRow]:
    words = [record for record in records if record[1][0].isdecimal()]
    for number, (location, columns) in enumerate(words, 1):
        if int(columns[0]) != number:
            raise InputError(f"{location}: word {columns[0]} where {number} is expected; number the words from 1")
    return words


def _no_space_before(records: Sequence[ConlluRow]) -> list[bool]:
    """Return for each word whether it follows the word before it without a space."""
    forms = {int(columns[0]): columns[1] for _, columns in records if columns[0].isdecimal()}
    no_space_after = dict.fromkeys(forms, False)
    ranges: list[tuple[int, int]] = []
    for location, columns in records:
        id_match, space_after = _ID.fullmatch(columns[0]), "SpaceAfter=No" not in columns[9].split("|")
        assert id_match is not None  # checked by `_parse_conllu_row`
        if id_match["empty"]:
            continue
        first, last = int(id_match["word"]), int(id_match["last"] or id_match["word"])
        if not 1 <= first <= last <= len(forms):
            raise InputError(f"{location}: the range {columns[0]} is outside the {len(forms)} words of its sentence")
        if id_match["last"]:
            ranges.append((first, last))
            # "zum" is the range of "zu" and "dem": words are joined only if together they give the written form
            joined = "".join(forms[number] for number in range(first, last + 1)) == columns[1]
            no_space_after |= dict.fromkeys(range(first, last), joined) | {last: not space_after}
        elif not any(begin <= first <= end for begin, end in ranges):
            no_space_after[first] = not space_after
    return [False, *(no_space_after[number] for number in range(1, len(forms)))]
