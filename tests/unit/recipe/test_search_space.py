"""Search spaces of `qkv sweep`: ranges, choices and fixed values."""

from __future__ import annotations

import pytest

from qkv.errors import InputError
from qkv.recipe.search_space import Choice, Range, parse_search_space


def test_ranges_choices_and_fixed_values_are_told_apart() -> None:
    space = parse_search_space(
        ["a.rate=1e-5..1e-3:log", "a.epochs=2..10", "a.drop=0..0.5:step=0.1", "a.pool=first,mean", "a.betas=[0.9,0.98]"]
    )
    assert space.dimensions == (
        Range("a.rate", 1e-5, 1e-3, log=True),
        Range("a.epochs", 2, 10),
        Range("a.drop", 0, 0.5, step=0.1),
        Choice("a.pool", ("first", "mean")),
    )
    assert [d.is_integer for d in space.dimensions if isinstance(d, Range)] == [False, True, False]
    assert space.overrides == ("a.betas=[0.9,0.98]",)


def test_choices_keep_the_types_of_yaml() -> None:
    (choice,) = parse_search_space(["a=1,0.5,true,null,x"]).dimensions
    assert isinstance(choice, Choice)
    assert choice.values == (1, 0.5, True, None, "x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a=1"], "nothing to search"),
        ([], "nothing to search"),
        (["a"], "give key=low..high"),
        (["=1..2"], "give key=low..high"),
        (["a=2..1"], "the range is empty"),
        (["a=1..1"], "the range is empty"),
        (["a=0..1:log"], "starts above 0"),
        (["a=1..2:log:step=1"], "has no step"),
        (["a=1..2:linear"], "ends in :log or :step=N"),
        (["a=1..2:step=9"], "fit into the range"),
        (["a=1..x"], "'x' is not a number"),
        (["a=nan..1"], "'nan' is not a number"),
        (["a=1..1e999"], "is not a number"),
        (["a=1..2", "a=3"], "a is set twice"),
        (["a=x,x"], "a value occurs twice"),
    ],
)
def test_a_bad_space_is_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_search_space(arguments)
