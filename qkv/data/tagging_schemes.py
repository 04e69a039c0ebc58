"""Chunks written as tags: BIO, its elder IOB1, and BIOES; which one a file is in, whether it keeps to it, and how one
becomes the other.

A chunk of two words reads B-x I-x in BIO (Ratnaparkhi's IOB2), I-x I-x in IOB1 (Ramshaw and Marcus, 1995), where B-x
only parts a chunk from one of its kind just before it, and B-x E-x in BIOES, where S-x is a chunk of one word.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain

from qkv.data.examples import Span, TaggedExample, TextExample
from qkv.errors import InputError, did_you_mean

SCHEMES = ("BIO", "IOB1", "BIOES")
OUTSIDE = "O"
_CHUNK_TAG = re.compile(r"[BIES]-.+")
_ASCII_WORD = re.compile(r"\w+|[^\w\s]")  # of ASCII
_JOINERS = "\u200c\u200d"  # between letters, of Persian or Hindi say, and between the parts of an emoji

Violation = tuple[int, str]  # a word's number and what is wrong with its tag


def detect_scheme(sentences: Iterable[Sequence[str]]) -> str | None:
    """The scheme that the tags are written in, or come nearest to; None if they mark no chunks, as parts of speech."""
    sentences = list(sentences)
    counts = Counter(tag for sentence in sentences for tag in sentence)
    chunk_tags = {tag for tag in counts if _CHUNK_TAG.fullmatch(tag)}
    num_chunk_tags = sum(counts[tag] for tag in {*chunk_tags, OUTSIDE})
    if not chunk_tags or 2 * num_chunk_tags < counts.total():  # a few that look like chunks do not make a scheme, nor unmake one
        return None
    # One slip in a long file must not turn it into another scheme: the one that is broken least often it is.
    candidates = ("BIOES", "BIO", "IOB1") if any(tag[0] in "ES" for tag in chunk_tags) else ("BIO", "IOB1")
    return min(candidates, key=lambda scheme: sum(first_violation(sentence, scheme) is not None for sentence in sentences))


def first_violation(tags: Sequence[str], scheme: str) -> Violation | None:
    """The first tag that its scheme does not allow where it stands."""
    if scheme not in SCHEMES:
        raise InputError(f"tag scheme '{scheme}' is unknown; {did_you_mean(scheme, SCHEMES)}")
    previous = OUTSIDE
    for number, tag in enumerate(tags):
        if tag != OUTSIDE and (not _CHUNK_TAG.fullmatch(tag) or (scheme != "BIOES" and tag[0] in "ES")):
            return number, f"tag '{tag}' is not {scheme}"
        if not _may_follow(previous, tag, scheme):
            return number, f"tag '{tag}' after '{previous}' is not {scheme}"
        previous = tag
    if scheme == "BIOES" and previous[0] in "BI":
        return len(tags) - 1, f"tag '{previous}' at the end of a sentence is not BIOES"
    return None


def _may_follow(previous: str, tag: str, scheme: str) -> bool:
    same_type = previous[2:] == tag[2:] and previous != OUTSIDE
    if scheme == "BIO":
        return tag[0] != "I" or same_type
    if scheme == "IOB1":
        return tag[0] != "B" or same_type
    is_open = previous[0] in "BI"
    return (is_open and same_type) if tag[0] in "IE" else not is_open


def bio_from_iob1(tags: Sequence[str]) -> tuple[str, ...]:
    """Each chunk's first word gets its B."""
    previous_tags = [OUTSIDE, *tags[:-1]]
    return tuple(
        f"B-{tag[2:]}" if tag[0] == "I" and previous[2:] != tag[2:] else tag for previous, tag in zip(previous_tags, tags, strict=True)
    )


def bioes_from_bio(tags: Sequence[str]) -> tuple[str, ...]:
    """Each chunk's last word gets its E, and a chunk of one word its S."""
    converted = []
    for tag, next_tag in zip(tags, [*tags[1:], OUTSIDE], strict=True):
        is_last = tag != OUTSIDE and next_tag != f"I-{tag[2:]}"
        converted.append({"B": "S", "I": "E"}[tag[0]] + tag[1:] if is_last else tag)
    return tuple(converted)


def bio_from_bioes(tags: Sequence[str]) -> tuple[str, ...]:
    """E and S are the I and B that they are at the end of a chunk."""
    letters = {"E": "I", "S": "B"}
    return tuple(tag if tag == OUTSIDE else letters.get(tag[0], tag[0]) + tag[1:] for tag in tags)


def split_words(text: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The words and punctuation marks of a raw text, and where they start."""
    matches = list((_ASCII_WORD if text.isascii() else _unicode_word_pattern()).finditer(text))
    return tuple(word.group() for word in matches), tuple(word.start() for word in matches)


@cache
def _unicode_word_pattern() -> re.Pattern[str]:
    """The same with what belongs to the letter before it: accents that are written apart, the vowel signs of Hindi."""
    signs = map(chr, chain(range(0x300, 0x20000), range(0xE0000, 0xE0200)))  # between the two are Chinese signs alone
    vocab = "".join(sign for sign in signs if unicodedata.category(sign)[0] == "M") + _JOINERS
    return re.compile(rf"\w[\w{vocab}]*|[^\w\s][{vocab}]*")


def spans_to_tags(example: TextExample) -> TaggedExample:
    """The words of a text with its spans as BIO tags.

    A word belongs to a span that has any of its characters; of spans that share a word the longest keeps it all.
    """
    words, starts = split_words(example.text)
    tags = [OUTSIDE] * len(words)
    for span in sorted((s for s in example.spans if not s.in_text_pair), key=lambda s: (s.start - s.end, s.start)):
        word_indices = _words_in_span(span, words, starts)
        if all(tags[number] == OUTSIDE for number in word_indices):
            for number in word_indices:
                tags[number] = f"{'B' if number == word_indices[0] else 'I'}-{span.name}"
    return TaggedExample(example.text, words, starts, tuple(tags), example.location, example.id)


def _words_in_span(span: Span, words: Sequence[str], starts: Sequence[int]) -> list[int]:
    ends = [start + len(word) for start, word in zip(starts, words, strict=True)]
    return [n for n, (start, end) in enumerate(zip(starts, ends, strict=True)) if start < span.end and span.start < end]
