"""Leave out examples that cannot be used, and list them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from qkv.errors import InputError, one_line

if TYPE_CHECKING:
    from qkv.data.examples import Examples, ExampleT

_MAX_LISTED = 20  # reasons listed, one per line


def filter_invalid(examples: Examples[ExampleT], check: Callable[[Sequence[ExampleT]], Any]) -> Examples[ExampleT]:
    """Return the examples that `check` accepts; the errors of the others are added to `skipped`."""
    valid = examples.derive()
    _bisect_invalid(examples, check, valid)
    return valid


def _bisect_invalid(
    examples: Sequence[ExampleT], check: Callable[[Sequence[ExampleT]], Any], valid: Examples[ExampleT]
) -> None:
    """Find the few invalid examples by bisection."""
    try:
        check(examples)
    except InputError as error:
        if len(examples) > 1:
            half = len(examples) // 2
            _bisect_invalid(examples[:half], check, valid)
            _bisect_invalid(examples[half:], check, valid)
            return
        # an error that does not name the example concerns all of them or the settings, and is raised later
        if str(error).startswith(f"{examples[0].location}:"):
            valid.skipped.append(one_line(error))
            return
    valid.extend(examples)


def format_skipped(reasons: Sequence[str], count: int | None = None) -> list[str]:
    """Return lines with the number of skipped examples and the first reasons.

    `count` is the number of skipped examples if `reasons` does not have all of them.
    """
    count = len(reasons) if count is None else count
    if not count:
        return []
    summary = f"{count:,} bad {'example was' if count == 1 else 'examples were'} skipped"
    more = [] if count <= _MAX_LISTED else [f"  … and {count - _MAX_LISTED:,} more"]
    return [f"{summary}:", *(f"  {reason}" for reason in reasons[:_MAX_LISTED]), *more]
