"""Tagging schemes for chunks: detection, validation, conversion of IOB1 to BIO, and tags from spans.

A chunk of two words is B-x I-x in BIO (Ratnaparkhi's IOB2), B-x E-x in BIOES, where S-x is a chunk of one word, and
I-x I-x in IOB1 (Ramshaw and Marcus, 1995), where B-x only separates a chunk from one of the same type before it.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain

from qkv.data.examples import Span, TaggedExample, TextExample
from qkv.errors import InputError, did_you_mean, quote

SCHEMES = ("BIO", "IOB1", "BIOES")
OUTSIDE = "O"
_CHUNK_TAG = re.compile(r"[BIES]-.+")
_ASCII_WORD = re.compile(r"\w+|[^\w\s]")
_JOINERS = "\u200c\u200d"  # zero-width characters inside words of Persian or Hindi, and inside emoji

Violation = tuple[int, str]  # index of the word, and the problem with its tag


def detect_scheme(sentences: Iterable[Sequence[str]]) -> str | None:
    """Return the scheme that the tags violate least; None if they do not mark chunks (such as parts of speech)."""
    sentences = list(sentences)
    counts = Counter(tag for sentence in sentences for tag in sentence)
    chunk_tags = {tag for tag in counts if _CHUNK_TAG.fullmatch(tag)}
    num_chunk_tags = sum(counts[tag] for tag in {*chunk_tags, OUTSIDE})
    # a few tags that look like chunk tags do not make a scheme
    if not chunk_tags or 2 * num_chunk_tags < counts.total():
        return None

    def num_violations(scheme: str) -> int:
        return sum(first_violation(sentence, scheme) is not None for sentence in sentences)

    # single errors in a long file must not change the result, so violations are counted
    candidates = ("BIOES", "BIO", "IOB1") if any(tag[0] in "ES" for tag in chunk_tags) else ("BIO", "IOB1")
    return min(candidates, key=num_violations)


def first_violation(tags: Sequence[str], scheme: str) -> Violation | None:
    """Return the first tag that the scheme does not allow at its position, or None."""
    if scheme not in SCHEMES:
        raise InputError(f"tag scheme '{scheme}' is unknown; {did_you_mean(scheme, SCHEMES)}")
    previous = OUTSIDE
    for number, tag in enumerate(tags):
        if tag != OUTSIDE and (not _CHUNK_TAG.fullmatch(tag) or (scheme != "BIOES" and tag[0] in "ES")):
            return number, f"tag {quote(tag)} is not {scheme}"
        if not _may_follow(previous, tag, scheme):
            return number, f"tag {quote(tag)} after {quote(previous)} is not {scheme}"
        previous = tag
    if scheme == "BIOES" and previous[0] in "BI":
        return len(tags) - 1, f"tag {quote(previous)} at the end of a sentence is not BIOES"
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
    """Convert IOB1 to BIO: the first word of each chunk gets the tag B."""
    previous_tags = [OUTSIDE, *tags[:-1]]
    return tuple(
        f"B-{tag[2:]}" if tag[0] == "I" and previous[2:] != tag[2:] else tag
        for previous, tag in zip(previous_tags, tags, strict=True)
    )


def split_words(text: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Split a text into words and punctuation marks; return them and the start of each."""
    matches = list((_ASCII_WORD if text.isascii() else _unicode_word_pattern()).finditer(text))
    return tuple(word.group() for word in matches), tuple(word.start() for word in matches)


@cache
def _unicode_word_pattern() -> re.Pattern[str]:
    """Compile a pattern of words that keeps combining marks (accents, the vowel signs of Hindi) with their letter."""
    # the code points between the two ranges are Chinese characters
    characters = map(chr, chain(range(0x300, 0x20000), range(0xE0000, 0xE0200)))
    marks = "".join(character for character in characters if unicodedata.category(character)[0] == "M") + _JOINERS
    return re.compile(rf"\w[\w{marks}]*|[^\w\s][{marks}]*")


def spans_to_tags(example: TextExample) -> TaggedExample:
    """Return the words of a text with its spans as BIO tags.

    A word belongs to a span that contains any of its characters. If spans share a word, only the longest is tagged.
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
