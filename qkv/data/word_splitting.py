"""Words of a raw text for a tagger: split as the words of its training data are.

Corpora differ in what a word is: CoNLL-2003 keeps "U.S." and "New-York" whole and makes the full stop of a sentence a
word of its own, Penn Treebank cuts "don't" to "do n't", tweets keep "@user". The rules are learned from the words of
the training data and saved with the model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qkv.data.examples import TaggedExample
from qkv.data.tagging_schemes import split_words
from qkv.errors import InputError, quote

_CHUNK = re.compile(r"\S+")
_INITIALS = re.compile(r"(?:[^\W\d_]\.){2,}")  # "U.S.", "J.R.R."
_URL = re.compile(r"\w+://\S*[\w/]")
_CLITIC = re.compile(r"['’][^\W\d_]{1,3}|n['’]t", re.IGNORECASE)  # "'s", "'ll", "n't"
_MIN_SUFFIX_SHARE = 0.05  # of the most frequent ending; rarer ones are words after a quotation mark
_MAX_WORDS = 500  # words with punctuation that are saved with a model, the most frequent first

Words = tuple[tuple[str, ...], tuple[int, ...]]  # words and the start of each


@dataclass(frozen=True, slots=True)
class WordRules:
    """Which punctuation is part of a word; all other marks are words of their own."""

    inner: str = ""
    """Marks that stay in a word between two letters or digits, such as the hyphen."""
    leading: str = ""
    """Marks that stay at the beginning of a word, such as the @ of a user's name."""
    trailing: str = ""
    """Marks that stay at the end of a word."""
    words: tuple[str, ...] = ()
    """Words that are whole although they begin or end with a mark ("Mr."), or consist of several ("...")."""
    suffixes: tuple[str, ...] = ()
    """Endings that are words of their own, such as n't."""
    initials: bool = True
    """Whether letters with full stops, such as U.S., are one word."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> WordRules:
        """Make rules from a mapping of a recipe."""
        kinds: dict[str, Any] = {"inner": str, "leading": str, "trailing": str, "initials": bool}
        fields: dict[str, Any] = {}
        for name, value in values.items():
            is_words = isinstance(value, list | tuple) and all(isinstance(word, str) and word for word in value)
            if not (is_words if name in ("words", "suffixes") else isinstance(value, kinds.get(name, ()))):
                raise InputError(f"task.word_rules: {quote(name)} is no rule with such a value; see docs/data.md")
            fields[name] = tuple(value) if is_words else value
        return cls(**fields)

    def to_json(self) -> dict[str, Any]:
        """Return the rules as they are in a recipe."""
        values = {"inner": self.inner, "leading": self.leading, "trailing": self.trailing}
        return values | {"words": list(self.words), "suffixes": list(self.suffixes), "initials": self.initials}


DEFAULT_RULES = WordRules(inner="-.,'’&/_:@")
"""Rules for a model whose training data is unknown: marks at the ends of a word are words of their own."""


def learn_word_rules(sentences: Iterable[TaggedExample]) -> WordRules:
    """Return the rules that the words of training sentences follow."""
    inside: Counter[str] = Counter()  # marks inside words; those that are words of their own there count against
    leading: Counter[str] = Counter()
    trailing: Counter[str] = Counter()
    with_marks: Counter[str] = Counter()
    suffixes: Counter[str] = Counter()
    has_initials = cuts_initials = False
    for sentence in sentences:
        cuts_initials |= _cuts_initials(sentence)
        _count_splits(sentence, inside)
        for word in sentence.words:
            segments, _ = split_words(word)
            if len(segments) == 1:
                leading[word] -= 1
                trailing[word] -= 1
                continue
            has_initials |= _INITIALS.fullmatch(word) is not None
            inside.update(mark for before, mark, after in _triples(segments) if _is_word(before) and _is_word(after))
            if _CLITIC.fullmatch(word):
                suffixes[word.lower()] += 1
            elif not all(map(_is_word, (segments[0], segments[-1]))):
                with_marks[word] += 1
                leading[segments[0]] += not _is_word(segments[0]) and _is_word(segments[1])
                trailing[segments[-1]] += not _is_word(segments[-1]) and _is_word(segments[-2])
    return WordRules(
        inner="".join(sorted(mark for mark, count in inside.items() if count > 0 and not _is_word(mark))),
        leading="".join(sorted(mark for mark, count in leading.items() if count > 0 and not _is_word(mark))),
        trailing="".join(sorted(mark for mark, count in trailing.items() if count > 0 and not _is_word(mark))),
        words=tuple(word for word, _ in with_marks.most_common(_MAX_WORDS)),
        suffixes=tuple(word for word, n in suffixes.items() if n >= _MIN_SUFFIX_SHARE * max(suffixes.values())),
        initials=has_initials or not cuts_initials,
    )


def _triples(segments: Sequence[str]) -> Iterable[tuple[str, str, str]]:
    return zip(segments, segments[1:], segments[2:], strict=False)


def _is_word(segment: str) -> bool:
    return segment[:1].isalnum() or segment[:1] == "_"


def _count_splits(sentence: TaggedExample, inside: Counter[str]) -> None:
    """Count down the marks that are words between two words without a space, as in UD's "well - known"."""
    spans = list(zip(sentence.words, sentence.word_starts, strict=True))
    for (before, start), (mark, mark_start), (after, after_start) in zip(spans, spans[1:], spans[2:], strict=False):
        is_unbroken = start + len(before) == mark_start and mark_start + len(mark) == after_start
        if is_unbroken and not _is_word(mark) and _is_word(before[-1:]) and _is_word(after):
            inside[mark] -= 1


def _cuts_initials(sentence: TaggedExample) -> bool:
    """Return whether the text has initials that are several words."""
    starts = {start: len(word) for start, word in zip(sentence.word_starts, sentence.words, strict=True)}
    matches = _INITIALS.finditer(sentence.text)
    return any(starts.get(match.start(), 0) < match.end() - match.start() for match in matches)


def split_by_rules(text: str, rules: WordRules) -> Words:
    """Split a text into words; return them and the start of each."""
    words: list[str] = []
    starts: list[int] = []
    whole_words = frozenset(rules.words)
    for chunk in _CHUNK.finditer(text):
        start = chunk.start()
        for word in _split_chunk(chunk.group(), rules, whole_words):
            words.append(word)
            starts.append(start)
            start += len(word)
    return tuple(words), tuple(starts)


def split_at_spaces(text: str) -> Words:
    """Return the words of a text that is already split: words with spaces between them."""
    matches = list(_CHUNK.finditer(text))
    return tuple(match.group() for match in matches), tuple(match.start() for match in matches)


def _split_chunk(chunk: str, rules: WordRules, whole_words: frozenset[str]) -> list[str]:
    """Split a segment of text without white space."""
    if chunk in whole_words:
        return [chunk]
    segments = list(split_words(chunk)[0])
    if len(segments) == 1 or sum(map(len, segments)) != len(chunk):  # some mark belongs to no segment
        return segments or [chunk]

    def is_whole(core: Sequence[str]) -> bool:
        word = "".join(core)
        is_initials = rules.initials and _INITIALS.fullmatch(word)
        return word in whole_words or bool(_URL.fullmatch(word) or is_initials)

    before: list[str] = []
    after: list[str] = []
    while segments and not is_whole(segments) and not _is_word(segments[0]):
        if len(segments) > 1 and segments[0] in rules.leading and _is_word(segments[1]):
            break
        size = _whole_prefix(segments, whole_words)
        before.append("".join(segments[:size]))
        del segments[:size]
    while segments and not is_whole(segments) and not _is_word(segments[-1]):
        if len(segments) > 1 and segments[-1] in rules.trailing and _is_word(segments[-2]):
            break
        size = _whole_suffix(segments, whole_words)
        after.insert(0, "".join(segments[-size:]))
        del segments[-size:]
    core = ["".join(segments)] if is_whole(segments) else _split_core(segments, rules)
    return [*before, *(word for word in core if word), *after]


def _whole_prefix(segments: Sequence[str], whole_words: frozenset[str]) -> int:
    """Return how many of the first marks form a word, such as three full stops."""
    num_marks = next((i for i, segment in enumerate(segments) if _is_word(segment)), len(segments))
    return next((size for size in range(num_marks, 1, -1) if "".join(segments[:size]) in whole_words), 1)


def _whole_suffix(segments: Sequence[str], whole_words: frozenset[str]) -> int:
    num_marks = next((i for i, segment in enumerate(reversed(segments)) if _is_word(segment)), len(segments))
    return next((size for size in range(num_marks, 1, -1) if "".join(segments[-size:]) in whole_words), 1)


def _split_core(segments: Sequence[str], rules: WordRules) -> list[str]:
    """Split a segment that begins and ends with a letter or digit: at endings, and at marks that do not stay inside."""
    word = "".join(segments)
    lower = word.lower()
    suffix = next((s for s in sorted(rules.suffixes, key=len, reverse=True) if lower.endswith(s)), "")
    if suffix and len(suffix) < len(word):
        stem = word[: -len(suffix)]
        return [*_split_core(split_words(stem)[0], rules), word[-len(suffix) :]]
    words: list[str] = []
    for number, segment in enumerate(segments):
        is_inner = not _is_word(segment) and segment in rules.inner and 0 < number < len(segments) - 1
        joins_before = number > 0 and not _is_word(segments[number - 1]) and _is_joined(segments, number - 1, rules)
        if words and ((is_inner and _is_joined(segments, number, rules)) or (_is_word(segment) and joins_before)):
            words[-1] += segment
        else:
            words.append(segment)
    if len(words) > 1 and not _is_word(words[0]) and words[0] in rules.leading:
        words[:2] = [words[0] + words[1]]
    if len(words) > 1 and not _is_word(words[-1]) and words[-1] in rules.trailing:
        words[-2:] = [words[-2] + words[-1]]
    return words


def _is_joined(segments: Sequence[str], number: int, rules: WordRules) -> bool:
    """Return whether the mark at an index stays inside a word."""
    if not 0 < number < len(segments) - 1 or segments[number] not in rules.inner:
        return False
    return _is_word(segments[number - 1]) and _is_word(segments[number + 1])
