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

from qkv.data.examples import TaggedExample
from qkv.data.formats.fields import strings_field
from qkv.data.formats.io import ErrorPolicy, decode_line, json_records, read_blocks
from qkv.data.tagging_schemes import SCHEMES, bio_from_iob1, detect_scheme, first_violation
from qkv.errors import InputError, did_you_mean

_DOCSTART = b"-DOCSTART-"
_COLUMNS = {1: ("word",), 2: ("word", "tag"), 3: ("word", "pos", "tag"), 4: ("word", "pos", "chunk", "ner")}
CONLLU_COLUMNS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
_ID = re.compile(r"(?P<word>\d{1,9})(?:-(?P<last>\d{1,9})|(?P<empty>\.\d+))?")
_UNSET = "_"
_SNIFFED_SENTENCES = 1000  # sentences that tell how many columns a file has
_NO_SCHEME = "NONE"  # tags that mark no chunks
_INFER = "as the tags tell"  # not None, which the command line has for "none"


@dataclass(frozen=True, slots=True)
class _Sentence:
    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    locations: tuple[str, ...]  # of each word


def read(path: Path, error_policy: ErrorPolicy, *, tag: str | None = None, scheme: str | None = _INFER) -> Iterator[TaggedExample]:
    """Sentences with the tags of one column: "pos", "chunk" or "ner" of four, else a number from 1; the last one
    without it.

    `scheme` is BIO, IOB1, BIOES, or "none" or None for tags that are no chunks; without it the file's tags tell.
    """
    yield from _to_examples(list(_read_sentences(path, error_policy, tag)), error_policy, scheme)


def read_jsonl(
    path: Path, error_policy: ErrorPolicy, *, words: str = "words", tags: str | None = "tags", scheme: str | None = _INFER
) -> Iterator[TaggedExample]:
    """Sentences out of JSON lines with a list of words and one of tags; the scheme as of `read`."""
    yield from _to_examples(list(_read_jsonl_sentences(path, error_policy, words, tags)), error_policy, scheme)


def _read_jsonl_sentences(path: Path, error_policy: ErrorPolicy, words: str, tags: str | None) -> Iterator[_Sentence]:
    for location, record in json_records(path, error_policy, f'{{"{words}": ["…", …], "{tags}": ["…", …]}}'):
        with error_policy:
            word_list = strings_field(record, words, location)
            tag_list = None if tags is None else strings_field(record, tags, location)
            if not word_list or not all(word.strip() for word in word_list):
                raise InputError(f"{location}: an empty word in '{words}', or none at all; repair the record")
            if tag_list is not None and len(tag_list) != len(word_list):
                raise InputError(f"{location}: {len(word_list)} words have {len(tag_list)} tags; give each word one")
            yield _Sentence(word_list, tag_list, (location,) * len(word_list))


def _to_examples(sentences: list[_Sentence], error_policy: ErrorPolicy, scheme: str | None) -> Iterator[TaggedExample]:
    scheme_name: str | None = (scheme or _NO_SCHEME).upper()
    if scheme == _INFER:
        scheme_name = detect_scheme(candidate.tags for candidate in sentences if candidate.tags is not None)
    if scheme_name is not None and scheme_name not in (*SCHEMES, _NO_SCHEME):
        raise InputError(f"tag scheme '{scheme}' is unknown; {did_you_mean(scheme_name, (*SCHEMES, _NO_SCHEME))}")
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
        raise InputError(f"{locations[number]}: {message}; correct the tag, or name the file's own scheme")
    return bio_from_iob1(tags) if scheme == "IOB1" else tags


def _read_sentences(path: Path, error_policy: ErrorPolicy, tag: str | None) -> Iterator[_Sentence]:
    all_blocks = read_blocks(path)
    first = list(islice(all_blocks, _SNIFFED_SENTENCES))  # not read twice: what is named may be a pipe
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
                    problem = f"{len(columns)} column{'s' * (len(columns) > 1)}" if len(columns) != num_columns else "an empty column"
                    raise InputError(f"{location}: {problem} where the file has {num_columns}; repair the line")
            tags = None if tag_column is None else tuple(columns[tag_column] for _, columns in rows)
            yield _Sentence(tuple(columns[0] for _, columns in rows), tags, tuple(location for location, _ in rows))


def _detect_num_columns(first: list[list[tuple[str, bytes]]]) -> int:
    """How many most of a file's first lines have: one that is bad must not speak for all."""
    raw_lines = (raw for block in first for _, raw in block if not raw.startswith(_DOCSTART))
    counts = Counter(len(_split_columns(raw.decode("utf-8", "replace"))) for raw in raw_lines)
    return counts.most_common(1)[0][0] if counts else 0


def _split_columns(line: str) -> list[str]:
    """Tabs part the columns where there is one, else spaces; other white space may be a word."""
    return line.split("\t") if "\t" in line else [field for field in line.split(" ") if field]


def _tag_column_index(tag: str | None, num_columns: int, location: str) -> int | None:
    """The number of the column of the tags; None where the words have none."""
    if tag is None:
        return num_columns - 1 if num_columns > 1 else None
    names = _COLUMNS.get(num_columns, ())
    if tag in names:
        return names.index(tag)
    if tag.isdecimal() and 1 <= int(tag) <= num_columns:
        return int(tag) - 1
    known = ", ".join([*names, f"1 to {num_columns}"])
    raise InputError(f"{location}: no column '{tag}'; the columns are: {known}")


def join_words(words: Sequence[str], no_space_before: Sequence[bool] = ()) -> tuple[str, tuple[int, ...]]:
    """The words as a text, and where in it they start: a space before each but the first and those that are glued."""
    starts, text = [], ""
    for number, word in enumerate(words):
        text += "" if not number or (no_space_before and no_space_before[number]) else " "
        starts.append(len(text))
        text += word
    return text, tuple(starts)


# ---- CoNLL-U --------------------------------------------------------------------------------------------------------


def read_conllu(path: Path, error_policy: ErrorPolicy, *, tag: str = "upos") -> Iterator[TaggedExample]:
    """Sentences of CoNLL-U with the tags of a column: upos, xpos, feats, lemma, deprel, …

    The syntactic words are the words: a range ("1-2 don't") only says how they are written, an empty node ("8.1") is
    left out. The text has spaces where the file says that there were some.
    """
    if tag not in CONLLU_COLUMNS:
        raise InputError(f"{path}: no column '{tag}'; the columns are: {', '.join(CONLLU_COLUMNS)}")
    column = CONLLU_COLUMNS.index(tag)
    for block in read_blocks(path):
        with error_policy:
            lines = [(location, decode_line(raw, location)) for location, raw in block]
            sentence_ids = [line.partition("=")[2].strip() for _, line in lines if re.match(r"#\s*sent_id\s*=", line)]
            records = [(location, _parse_conllu_row(line, location)) for location, line in lines if not line.startswith("#")]
            words = _syntactic_words(records)
            if not words:  # comments between sentences
                continue
            tags = tuple(_check_filled(record[column], tag, location) for location, record in words)
            forms = tuple(record[1] for _, record in words)
            text, starts = join_words(forms, _no_space_before(records))
            unset = all(value == _UNSET for value in tags) and tag in ("upos", "xpos", "lemma", "deprel")
            yield TaggedExample(text, forms, starts, None if unset else tags, words[0][0], sentence_ids[0] if sentence_ids else "")


def _check_filled(value: str, name: str, location: str) -> str:
    if not value.strip():
        raise InputError(f"{location}: the column '{name}' is empty here; fill it in, with {_UNSET} if there is nothing")
    return value


ConlluRow = tuple[str, list[str]]  # a place and the ten columns


def _parse_conllu_row(line: str, location: str) -> list[str]:
    columns = line.split("\t")
    if len(columns) != len(CONLLU_COLUMNS):
        raise InputError(f"{location}: {len(columns)} columns where CoNLL-U has {len(CONLLU_COLUMNS)}, parted by tabs")
    if not _ID.fullmatch(columns[0]):
        raise InputError(f"{location}: id '{columns[0]}' is no word (1), range (1-2) or empty node (1.1) of CoNLL-U")
    if not columns[1].strip():
        raise InputError(f"{location}: the word is empty; fill in the second column")
    return columns


def _syntactic_words(records: Sequence[ConlluRow]) -> list[ConlluRow]:
    words = [record for record in records if record[1][0].isdecimal()]
    for number, (location, columns) in enumerate(words, 1):
        if int(columns[0]) != number:
            raise InputError(f"{location}: word {columns[0]} where {number} should come; number the words from 1 on")
    return words


def _no_space_before(records: Sequence[ConlluRow]) -> list[bool]:
    """Whether each word stands without a space behind the one before it."""
    forms = {int(columns[0]): columns[1] for _, columns in records if columns[0].isdecimal()}
    no_space_after = dict.fromkeys(forms, False)  # no space behind the word
    ranges: list[tuple[int, int]] = []
    for location, columns in records:
        id_match, space_after = _ID.fullmatch(columns[0]), "SpaceAfter=No" not in columns[9].split("|")
        assert id_match is not None  # `_parse_conllu_row` has refused it
        if id_match["empty"]:
            continue
        first, last = int(id_match["word"]), int(id_match["last"] or id_match["word"])
        if not 1 <= first <= last <= len(forms):
            raise InputError(f"{location}: the range {columns[0]} is not among the {len(forms)} words of its sentence")
        if id_match["last"]:
            ranges.append((first, last))
            # "zum" is not "zu" and "dem": only words that make up what was written are written together.
            joined = "".join(forms[number] for number in range(first, last + 1)) == columns[1]
            no_space_after |= dict.fromkeys(range(first, last), joined) | {last: not space_after}
        elif not any(begin <= first <= end for begin, end in ranges):
            no_space_after[first] = not space_after
    return [False, *(no_space_after[number] for number in range(1, len(forms)))]
