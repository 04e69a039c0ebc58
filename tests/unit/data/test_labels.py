"""Labels that were never seen, and classes that nobody has."""

from __future__ import annotations

import pytest

from qkv.data.examples import TaggedExample, TextExample
from qkv.data.labels import check_labels, collect_labels
from qkv.errors import InputError

EXAMPLES = [
    TextExample("a", "f.csv:2", label="good"),
    TextExample("b", "f.csv:3", label="bad"),
    TextExample("c", "f.csv:4", label=None),
]
SENTENCE = TaggedExample("in Bonn", ("in", "Bonn"), (0, 3), ("O", "B-x"), "f.conll:7")


def test_labels_are_those_of_classes_sets_and_tags() -> None:
    several = TextExample("a", "f:1", label=("joy", "anger"))
    number = TextExample("a", "f:1", label=2.5)
    assert collect_labels([*EXAMPLES, several, number, SENTENCE]) == ["B-x", "O", "anger", "bad", "good", "joy"]


def test_a_label_never_seen_in_training_is_named_by_line() -> None:
    assert check_labels(["bad", "good"], EXAMPLES) == EXAMPLES
    with pytest.raises(InputError, match=r"^f.csv:3: label 'bad' was never seen in training; known: fine, good$"):
        check_labels(["fine", "good"], EXAMPLES)
    with pytest.raises(InputError, match="label 'anger' was"):
        check_labels(["joy"], [TextExample("a", "f:1", label=("joy", "anger"))])


def test_a_tag_never_seen_in_training_names_its_word() -> None:
    with pytest.raises(InputError, match=r"^f.conll:7: label 'B-x' of 'Bonn' was never seen in training; known: O$"):
        check_labels(["O"], [SENTENCE])


def test_examples_with_labels_never_seen_can_be_skipped() -> None:
    kept = check_labels(["good"], EXAMPLES, skip_bad=True)
    assert kept == [EXAMPLES[0], EXAMPLES[2]]
    assert [said.partition(": ")[0] for said in kept.skipped] == ["f.csv:3"]


def test_a_long_list_of_labels_is_cut_in_the_message() -> None:
    with pytest.raises(InputError, match=r"known: 0, 1, .*, 11 and 88 more$"):
        check_labels(map(str, range(100)), EXAMPLES)
