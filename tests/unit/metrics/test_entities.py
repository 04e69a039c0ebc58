"""Entities of valid and invalid tag sequences, in the lenient and the strict schemes."""

from __future__ import annotations

import pytest

from qkv.errors import InputError
from qkv.metrics.entities import EntityF1, collect_entity_types, get_entities


@pytest.mark.parametrize(
    ("tags", "lenient", "strict"),
    [
        ("B-P I-P O B-L", "P0-2 L3-4", "P0-2 L3-4"),
        ("B-P B-P I-P", "P0-1 P1-3", "P0-1 P1-3"),
        ("O I-P I-P", "P1-3", ""),  # begins inside
        ("B-P I-L I-L", "P0-1 L1-3", "P0-1"),  # another type inside
        ("B-P O I-P", "P0-1 P2-3", "P0-1"),
        ("O O", "", ""),
        ("", "", ""),
        ("B I", "_0-2", "_0-2"),  # no types
    ],
)
def test_bio(tags: str, lenient: str, strict: str) -> None:
    for scheme, wanted in (("lenient", lenient), ("bio", strict)):
        result = get_entities(tags.split(), scheme)  # type: ignore[arg-type]
        assert " ".join(f"{e.type}{e.start}-{e.end}" for e in result) == wanted


@pytest.mark.parametrize(
    ("tags", "lenient", "strict"),
    [
        ("S-P B-P I-P E-P", "P0-1 P1-4", "P0-1 P1-4"),
        ("B-P I-P O", "P0-2", ""),  # never ended
        ("B-P E-P E-P", "P0-2 P2-3", "P0-2"),
        ("S-P I-P E-P", "P0-1 P1-3", "P0-1"),
        ("B-P E-L", "P0-1 L1-2", ""),
    ],
)
def test_bioes(tags: str, lenient: str, strict: str) -> None:
    for scheme, wanted in (("lenient", lenient), ("bioes", strict)):
        result = get_entities(tags.split(), scheme)  # type: ignore[arg-type]
        assert " ".join(f"{e.type}{e.start}-{e.end}" for e in result) == wanted


def test_a_right_span_of_the_wrong_type_is_wrong_twice() -> None:
    predicted, true = [["B-P", "I-P", "O"]], [["B-L", "I-L", "O"]]
    metric = EntityF1(collect_entity_types(predicted, true))
    assert metric(predicted, true)["f1_micro"] == 0.0
    table = metric.per_class(metric.statistics(predicted, true))
    assert (table["P"]["support"], table["L"]["support"]) == (0.0, 1.0)


def test_without_any_entity_every_figure_is_nought() -> None:
    assert set(EntityF1(collect_entity_types([["O"]]))([["O"]], [["O"]]).values()) == {0.0}


@pytest.mark.parametrize(("tag", "scheme"), [("X-P", "lenient"), ("PER", "lenient"), ("B-", "lenient"), ("E-P", "bio")])
def test_a_tag_of_another_scheme_is_refused(tag: str, scheme: str) -> None:
    with pytest.raises(InputError, match=f"token 2: '{tag}'"):
        get_entities(["O", tag], scheme)  # type: ignore[arg-type]


def test_tags_must_be_as_many_as_words() -> None:
    with pytest.raises(InputError, match="example 1: 1 predicted labels for 2 tokens"):
        EntityF1(("P",))([["O"]], [["O", "O"]])
