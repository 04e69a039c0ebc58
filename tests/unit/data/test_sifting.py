"""What cannot be used is left out alone, however it lies among the rest, and told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from qkv.data.examples import Examples, TextExample
from qkv.data.filtering import filter_invalid, format_skipped
from qkv.errors import InputError


def texts(count: int) -> Examples[TextExample]:
    return Examples((TextExample(str(number), f"a.csv:{number}") for number in range(count)), ["a.csv:999: unread"])


@pytest.mark.parametrize("bad", [set(), {0}, {6}, {2, 3}, set(range(7)), {1, 3, 5}])
def test_what_a_check_refuses_is_left_out_and_its_reason_kept(bad: set[int]) -> None:
    def check(some: Sequence[TextExample]) -> None:
        for one in some:
            if int(one.text) in bad:
                raise InputError(f"{one.location}: is\nbad")

    kept = filter_invalid(texts(7), check)
    assert [int(one.text) for one in kept] == [number for number in range(7) if number not in bad]
    assert kept.skipped == ["a.csv:999: unread", *(f"a.csv:{number}: is bad" for number in sorted(bad))]


def test_few_bad_ones_among_many_are_found_by_few_looks() -> None:
    looked = []

    def check(some: Sequence[TextExample]) -> None:
        looked.append(len(some))
        if any(one.text == "77" for one in some):
            raise InputError("a.csv:77: is bad")

    assert len(filter_invalid(texts(1024), check)) == 1023
    assert sum(looked) < 3 * 1024


def test_what_names_no_example_is_the_fault_of_none() -> None:
    def check(some: Sequence[TextExample]) -> None:
        raise InputError(f"a.csv:0 to a.csv:{len(some)}: all have one label")

    kept = filter_invalid(texts(3), check)
    assert (len(kept), kept.skipped) == (3, ["a.csv:999: unread"])


def test_reasons_are_counted_and_the_first_of_them_listed() -> None:
    assert format_skipped([]) == []
    assert format_skipped(["a"]) == ["1 bad example was skipped:", "  a"]
    lines = format_skipped([str(number) for number in range(30)], 1500)
    assert (lines[0], len(lines), lines[-1]) == ("1,500 bad examples were skipped:", 22, "  … and 1,480 more")
