"""What is left out of a set of examples because nothing can be done with it, and how a person is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from qkv.data.examples import Examples, ExampleT
from qkv.errors import InputError, one_line

_MAX_LISTED = 20  # reasons that are told, a line each


def filter_invalid(examples: Examples[ExampleT], check: Callable[[Sequence[ExampleT]], Any]) -> Examples[ExampleT]:
    """Those that `check` does not refuse; what it says of each of the others joins what was skipped before."""
    valid: Examples[ExampleT] = Examples(skipped=examples.skipped)
    _bisect_invalid(examples, check, valid)
    return valid


def _bisect_invalid(examples: Sequence[ExampleT], check: Callable[[Sequence[ExampleT]], Any], valid: Examples[ExampleT]) -> None:
    """Bad ones are few: they are looked for by halves."""
    try:
        check(examples)
    except InputError as error:
        if len(examples) > 1:
            half = len(examples) // 2
            _bisect_invalid(examples[:half], check, valid)
            _bisect_invalid(examples[half:], check, valid)
            return
        # What does not name an example's place is the fault of all or of the settings, and is said when all are taken.
        if str(error).startswith(f"{examples[0].location}:"):  # type: ignore[attr-defined]
            valid.skipped.append(one_line(error))
            return
    valid.extend(examples)


def format_skipped(reasons: Sequence[str], count: int | None = None) -> list[str]:
    """What was left out: how many, and the first of them; `count` where not all reasons were kept."""
    count = len(reasons) if count is None else count
    if not count:
        return []
    summary = f"{count:,} bad {'example was' if count == 1 else 'examples were'} skipped"
    more = [] if count <= _MAX_LISTED else [f"  … and {count - _MAX_LISTED:,} more"]
    return [f"{summary}:", *(f"  {reason}" for reason in reasons[:_MAX_LISTED]), *more]
