"""Chunks as tags: the scheme detected, slips found, and a conversion that keeps every chunk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.data.examples import Span, TextExample
from qkv.data.tagging_schemes import (
    bio_from_iob1,
    detect_scheme,
    first_violation,
    spans_to_tags,
    split_words,
)
from qkv.errors import InputError

Chunks = list[tuple[str, int]]  # kind and length; "" for words outside
chunks = st.lists(st.tuples(st.sampled_from(["", "x", "y-z"]), st.integers(1, 3)), min_size=1)


def in_bio(found: Chunks) -> list[str]:
    return [f"{'B' if not place else 'I'}-{kind}" if kind else "O" for kind, length in found for place in range(length)]


def in_iob1(found: Chunks) -> list[str]:
    kinds = ["", *(kind for kind, _ in found)]
    return [
        (f"{'B' if not place and before == kind else 'I'}-{kind}" if kind else "O")
        for before, (kind, length) in zip(kinds, found, strict=False)
        for place in range(length)
    ]


def in_bioes(found: Chunks) -> list[str]:
    letters = {1: "S", 2: "BE", 3: "BIE"}
    return [f"{letters[length][place]}-{kind}" if kind else "O" for kind, length in found for place in range(length)]


@given(chunks)
def test_iob1_becomes_bio(found: Chunks) -> None:
    assert bio_from_iob1(in_iob1(found)) == tuple(in_bio(found))


@given(chunks)
def test_tags_that_keep_to_a_scheme_have_no_breach(found: Chunks) -> None:
    assert first_violation(in_bio(found), "BIO") is None
    assert first_violation(in_iob1(found), "IOB1") is None
    assert first_violation(in_bioes(found), "BIOES") is None


@given(st.lists(chunks, min_size=1))
def test_the_scheme_that_is_told_is_one_that_the_tags_keep_to(sentences: list[Chunks]) -> None:
    for written in (in_bio, in_iob1, in_bioes):
        tags = [written(found) for found in sentences]
        scheme = detect_scheme(tags)
        if scheme is not None:
            assert all(first_violation(sentence, scheme) is None for sentence in tags)


def test_one_slip_does_not_turn_a_file_into_another_scheme() -> None:
    assert detect_scheme([["B-x", "O"]] * 5 + [["O", "I-x"]]) == "BIO"
    assert detect_scheme([["I-x", "O"]] * 5 + [["O", "B-x"]]) == "IOB1"


def test_tags_that_mark_no_chunks_have_no_scheme() -> None:
    assert detect_scheme([["DT", "NN", "I-"], ["O"]]) is None
    assert detect_scheme([["DT", "NN", "VB", "B-x"]]) is None


@pytest.mark.parametrize(
    ("tags", "scheme", "word"),
    [
        (["O", "I-x"], "BIO", 1),
        (["B-x", "I-y"], "BIO", 1),
        (["B-x", "E-x"], "BIO", 1),
        (["O", "B-x"], "IOB1", 1),
        (["I-x", "B-y"], "IOB1", 1),
        (["O", "I-x", "E-x"], "BIOES", 1),
        (["B-x", "E-y"], "BIOES", 1),
        (["B-x", "S-x"], "BIOES", 1),
        (["S-x", "B-x"], "BIOES", 1),
        (["o"], "BIO", 0),
    ],
)
def test_a_breach_is_found_at_its_word(tags: list[str], scheme: str, word: int) -> None:
    found = first_violation(tags, scheme)
    assert found is not None
    assert found[0] == word


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(InputError, match="did you mean 'BIOES'"):
        first_violation(["O"], "BIOE")


# Spans


def test_spans_become_tags_of_the_words_that_they_touch() -> None:
    text = "A table for 5 adults, at 13:00pm!"
    example = TextExample(text, "f:1", spans=(Span(12, 20, "people"), Span(24, 30, "time")))  # " 13:00" of "13:00pm"
    made = spans_to_tags(example)
    assert made.words == ("A", "table", "for", "5", "adults", ",", "at", "13", ":", "00pm", "!")
    assert made.tags == ("O", "O", "O", "B-people", "I-people", "O", "O", "B-time", "I-time", "I-time", "O")
    assert [text[start:][: len(word)] for start, word in zip(made.word_starts, made.words, strict=True)] == list(
        made.words
    )


def test_of_spans_that_share_a_word_the_longest_is_kept() -> None:
    example = TextExample("at 8 tonight", "f:1", spans=(Span(5, 12, "date"), Span(3, 12, "time")))
    assert spans_to_tags(example).tags == ("O", "B-time", "I-time")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a \u0939\u093f\u0928\u094d\u0926\u0940 word", ("a", "\u0939\u093f\u0928\u094d\u0926\u0940", "word")),  # Hindi
        ("cafe\u0301, n\u0303o!", ("cafe\u0301", ",", "n\u0303o", "!")),  # accents by themselves
        ("caf\u00e9-bar", ("caf\u00e9", "-", "bar")),
        (
            "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
            ("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",),
        ),  # Persian
        ("\u2764\ufe0f ok", ("\u2764\ufe0f", "ok")),
    ],
    ids=["vowel signs", "accents apart", "accents", "joiner", "emoji"],
)
def test_a_raw_text_is_cut_between_words_and_never_inside_a_letter(text: str, words: tuple[str, ...]) -> None:
    found, starts = split_words(text)
    assert found == words
    assert all(text[start : start + len(word)] == word for word, start in zip(found, starts, strict=True))
