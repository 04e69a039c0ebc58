"""What is left out of a set of examples because nothing can be done with it, and how a person is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from qkv.data.examples import Examples, Kind
from qkv.errors import InputError, in_one_line

_LISTED = 20  # reasons that are told, a line each


def sifted(examples: Examples[Kind], check: Callable[[Sequence[Kind]], Any]) -> Examples[Kind]:
    """Those that `check` does not refuse; what it says of each of the others joins what was skipped before."""
    kept: Examples[Kind] = Examples(skipped=examples.skipped)
    _sift(examples, check, kept)
    return kept


def _sift(some: Sequence[Kind], check: Callable[[Sequence[Kind]], Any], kept: Examples[Kind]) -> None:
    """Bad ones are few: they are looked for by halves."""
    try:
        check(some)
    except InputError as error:
        if len(some) > 1:
            half = len(some) // 2
            _sift(some[:half], check, kept)
            _sift(some[half:], check, kept)
            return
        # What does not name an example's place is the fault of all or of the settings, and is said when all are taken.
        if str(error).startswith(f"{some[0].where}:"):  # type: ignore[attr-defined]
            kept.skipped.append(in_one_line(error))
            return
    kept.extend(some)


def skipped_lines(reasons: Sequence[str], count: int | None = None) -> list[str]:
    """What was left out: how many, and the first of them; `count` where not all reasons were kept."""
    count = len(reasons) if count is None else count
    if not count:
        return []
    said = f"{count:,} bad {'example was' if count == 1 else 'examples were'} skipped"
    more = [] if count <= _LISTED else [f"  … and {count - _LISTED:,} more"]
    return [f"{said}:", *(f"  {reason}" for reason in reasons[:_LISTED]), *more]
