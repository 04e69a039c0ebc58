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

from qkv.data.examples import Labelled, Span, Tagged
from qkv.errors import InputError, nearest

SCHEMES = ("BIO", "IOB1", "BIOES")
OUTSIDE = "O"
_CHUNK = re.compile(r"[BIES]-.+")
_WORD = re.compile(r"\w+|[^\w\s]")  # of ASCII
_JOINERS = "\u200c\u200d"  # between letters, of Persian or Hindi say, and between the parts of an emoji

Breach = tuple[int, str]  # a word's number and what is wrong with its tag


def scheme_of(sentences: Iterable[Sequence[str]]) -> str | None:
    """The scheme that the tags are written in, or come nearest to; None if they mark no chunks, as parts of speech."""
    sentences = list(sentences)
    counts = Counter(tag for sentence in sentences for tag in sentence)
    chunks = {tag for tag in counts if _CHUNK.fullmatch(tag)}
    shaped = sum(counts[tag] for tag in {*chunks, OUTSIDE})
    if not chunks or 2 * shaped < counts.total():  # a few that look like chunks do not make a scheme, nor unmake one
        return None
    # One slip in a long file must not turn it into another scheme: the one that is broken least often it is.
    likely = ("BIOES", "BIO", "IOB1") if any(tag[0] in "ES" for tag in chunks) else ("BIO", "IOB1")
    return min(likely, key=lambda scheme: sum(breach(sentence, scheme) is not None for sentence in sentences))


def breach(tags: Sequence[str], scheme: str) -> Breach | None:
    """The first tag that its scheme does not allow where it stands."""
    if scheme not in SCHEMES:
        raise InputError(f"tag scheme '{scheme}' is unknown; {nearest(scheme, SCHEMES)}")
    before = OUTSIDE
    for number, tag in enumerate(tags):
        if tag != OUTSIDE and (not _CHUNK.fullmatch(tag) or (scheme != "BIOES" and tag[0] in "ES")):
            return number, f"tag '{tag}' is not {scheme}"
        if not _follows(before, tag, scheme):
            return number, f"tag '{tag}' after '{before}' is not {scheme}"
        before = tag
    if scheme == "BIOES" and before[0] in "BI":
        return len(tags) - 1, f"tag '{before}' at the end of a sentence is not BIOES"
    return None


def _follows(before: str, tag: str, scheme: str) -> bool:
    same = before[2:] == tag[2:] and before != OUTSIDE
    if scheme == "BIO":
        return tag[0] != "I" or same
    if scheme == "IOB1":
        return tag[0] != "B" or same
    is_open = before[0] in "BI"
    return (is_open and same) if tag[0] in "IE" else not is_open


def bio_from_iob1(tags: Sequence[str]) -> tuple[str, ...]:
    """Each chunk's first word gets its B."""
    before = [OUTSIDE, *tags[:-1]]
    return tuple(
        f"B-{tag[2:]}" if tag[0] == "I" and last[2:] != tag[2:] else tag for last, tag in zip(before, tags, strict=True)
    )


def bioes_from_bio(tags: Sequence[str]) -> tuple[str, ...]:
    """Each chunk's last word gets its E, and a chunk of one word its S."""
    made = []
    for tag, after in zip(tags, [*tags[1:], OUTSIDE], strict=True):
        ends = tag != OUTSIDE and after != f"I-{tag[2:]}"
        made.append({"B": "S", "I": "E"}[tag[0]] + tag[1:] if ends else tag)
    return tuple(made)


def bio_from_bioes(tags: Sequence[str]) -> tuple[str, ...]:
    """E and S are the I and B that they are at the end of a chunk."""
    letters = {"E": "I", "S": "B"}
    return tuple(tag if tag == OUTSIDE else letters.get(tag[0], tag[0]) + tag[1:] for tag in tags)


def cut(text: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The words and punctuation marks of a raw text, and where they start."""
    found = list((_WORD if text.isascii() else _any_word()).finditer(text))
    return tuple(word.group() for word in found), tuple(word.start() for word in found)


@cache
def _any_word() -> re.Pattern[str]:
    """The same with what belongs to the letter before it: accents that are written apart, the vowel signs of Hindi."""
    signs = map(chr, chain(range(0x300, 0x20000), range(0xE0000, 0xE0200)))  # between the two are Chinese signs alone
    marks = "".join(sign for sign in signs if unicodedata.category(sign)[0] == "M") + _JOINERS
    return re.compile(rf"\w[\w{marks}]*|[^\w\s][{marks}]*")


def tagged(example: Labelled) -> Tagged:
    """The words of a text with its spans as BIO tags.

    A word belongs to a span that has any of its characters; of spans that share a word the longest keeps it all.
    """
    words, starts = cut(example.text)
    tags = [OUTSIDE] * len(words)
    for span in sorted((s for s in example.spans if not s.second), key=lambda s: (s.start - s.end, s.start)):
        inside = _inside(span, words, starts)
        if all(tags[number] == OUTSIDE for number in inside):
            for number in inside:
                tags[number] = f"{'B' if number == inside[0] else 'I'}-{span.name}"
    return Tagged(example.text, words, starts, tuple(tags), example.where, example.id)


def _inside(span: Span, words: Sequence[str], starts: Sequence[int]) -> list[int]:
    ends = [start + len(word) for start, word in zip(starts, words, strict=True)]
    return [n for n, (start, end) in enumerate(zip(starts, ends, strict=True)) if start < span.end and span.start < end]
