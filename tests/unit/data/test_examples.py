"""What decides which split an example falls in: strings that the splits of earlier runs were made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qkv.data.examples import (
    Answer,
    Example,
    ImageExample,
    MultipleChoiceExample,
    QAExample,
    Span,
    TaggedExample,
    TextExample,
)
from qkv.data.pair import Pair, SourceWithReferences

# Taken from the version whose classes and fields had these names.
SPLIT_KEYS = [
    (TextExample("a", "f:1"), "Labelled(text='a', where='', second=None, label=None, spans=(), id='', group='')"),
    (
        TextExample('It\'s "so"\n', "f:2", "zwei\t😀", "x", (Span(0, 2, "slot"),), "7", "g"),
        "Labelled(text='It\\'s \"so\"\\n', where='', second='zwei\\t😀', label='x', "
        "spans=(Span(start=0, end=2, name='slot', second=False),), id='7', group='g')",
    ),
    (
        TextExample("tea for two", "f:3", "at four", ("a", "b"), (Span(0, 3), Span(3, 7, "time", in_text_pair=True))),
        "Labelled(text='tea for two', where='', second='at four', label=('a', 'b'), spans=(Span(start=0, end=3, "
        "name='', second=False), Span(start=3, end=7, name='time', second=True)), id='', group='')",
    ),
    (
        TextExample("t", "f", None, 2.5),
        "Labelled(text='t', where='', second=None, label=2.5, spans=(), id='', group='')",
    ),
    (TextExample("t", "f", None, ()), "Labelled(text='t', where='', second=None, label=(), spans=(), id='', group='')"),
    (
        TextExample("t", "f", None, ("one",)),
        "Labelled(text='t', where='', second=None, label=('one',), spans=(), id='', group='')",
    ),
    (
        TaggedExample("EU rejects", ("EU", "rejects"), (0, 3), ("B-ORG", "O"), "f:9"),
        "Tagged(text='EU rejects', words=('EU', 'rejects'), starts=(0, 3), tags=('B-ORG', 'O'), where='', id='')",
    ),
    (
        TaggedExample("EU", ("EU",), (0,), None, "f:9", "s-1"),
        "Tagged(text='EU', words=('EU',), starts=(0,), tags=None, where='', id='s-1')",
    ),
    (
        MultipleChoiceExample("Why?", ("a", "it's"), 1, "f:4", "Because", "q1"),
        "Choice(context='Why?', options=('a', \"it's\"), right=1, where='', second='Because', id='q1')",
    ),
    (
        MultipleChoiceExample("Why?", ("a", "b"), None, "f:4"),
        "Choice(context='Why?', options=('a', 'b'), right=None, where='', second=None, id='')",
    ),
    (QAExample("i", "Who?", "He did.", (Answer("He", 0),), "f"), "He did."),
    (
        ImageExample(np.arange(6, dtype=np.uint8).reshape(2, 3), "f", "cat"),
        "654c928a5ccf87a61a9b67728a7e031b",
    ),
]


@pytest.mark.parametrize(("example", "key"), SPLIT_KEYS, ids=lambda value: type(value).__name__)
def test_the_split_key_is_byte_for_byte_what_it_always_was(example: TextExample, key: str) -> None:
    assert example.split_key() == key


@pytest.mark.parametrize(("example", "key"), SPLIT_KEYS, ids=lambda value: type(value).__name__)
def test_the_split_key_does_not_depend_on_the_place(example: TextExample, key: str) -> None:
    assert replace(example, location="elsewhere:7").split_key() == key


def test_a_picture_has_the_same_split_key_wherever_its_file_lies(tmp_path: Path) -> None:
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for path in paths:
        path.write_bytes(b"the same bytes")
    first, second = (ImageExample(path, str(path)).split_key() for path in paths)
    assert first == second


# What an example knows of itself

LABELED = [
    TextExample("a", "f:1", "b", label="x"),
    TextExample("a", "f:1", label=()),
    TaggedExample("New York", ("New", "York"), (0, 4), ("B-x", "I-x"), "f:1"),
    QAExample("q", "Who?", "Ada.", (Answer("Ada", 0),), "f:1"),
    QAExample("q", "Who?", "Ada.", (), "f:1", answerable=False),
    MultipleChoiceExample("a", ("b", "c"), 0, "f:1"),
    ImageExample(np.zeros((2, 2), np.uint8), "f:1", "x"),
    Pair("a", "b", "f:1"),
    SourceWithReferences("a", ("b", "c"), "f:1"),
]


@pytest.mark.parametrize("example", LABELED, ids=lambda example: type(example).__name__)
def test_an_example_without_its_label_keeps_all_its_texts(example: Example) -> None:
    assert example.is_labeled
    unlabeled = example.without_label()
    assert unlabeled.gold is None
    assert not unlabeled.is_labeled
    assert list(unlabeled.iter_texts()) == list(example.iter_texts())
    assert unlabeled.to_line() == example.to_line()
    assert unlabeled.location == example.location
    assert not list(unlabeled.iter_classes())


def test_a_line_has_tabs_between_the_texts() -> None:
    lines = [example.to_line() for example in LABELED]
    assert lines == ["a\tb", "a", "New York", "Who?\tAda.", "Who?\tAda.", "a\tb\tc", "f:1", "a", "a"]


def test_the_classes_of_a_label_are_names_and_never_numbers() -> None:
    assert [label for label, _ in TextExample("a", "f:1", label=("x", "y")).iter_classes()] == ["x", "y"]
    assert not list(TextExample("a", "f:1", label=2.5).iter_classes())
    assert list(LABELED[2].iter_classes()) == [("B-x", " of 'New'"), ("I-x", " of 'York'")]
