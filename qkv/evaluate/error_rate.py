"""Error rates of predicted token sequences, with several right answers allowed, as grapheme-to-phoneme papers count."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from qkv.errors import InputError


def edit_distance(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """The least number of insertions, deletions and substitutions from `a` to `b` (Levenshtein, 1966)."""
    first, last_a, last_b = 0, len(a), len(b)
    # An equal head and tail cost nothing in some best alignment, and most predictions are nearly right.
    while first < last_a and first < last_b and a[first] == b[first]:
        first += 1
    while last_a > first and last_b > first and a[last_a - 1] == b[last_b - 1]:
        last_a, last_b = last_a - 1, last_b - 1
    rest = b[first:last_b]
    row = list(range(len(rest) + 1))  # distances from the prefix of `a` read so far to each prefix of `rest`
    for read, token in enumerate(a[first:last_a], 1):
        diagonal, row[0] = row[0], read
        for column, other in enumerate(rest, 1):
            substituted = diagonal + (token != other)
            diagonal = row[column]
            row[column] = min(substituted, diagonal + 1, row[column - 1] + 1)
    return row[-1]


def error_rates(
    predictions: Sequence[str | Sequence[str]], references: Sequence[Sequence[str]]
) -> dict[str, float | int]:
    """Score each prediction against the closest of its references; rates are fractions, and "per" may exceed 1.

    - "per": token (phoneme) error rate: the sum of the edit distances to the closest references, divided by the sum of
      the lengths of those references. Of several equally close references the first counts.
    - "wer": the share of predictions that equal none of their references; G2P papers call it word error rate.
    - "examples": how many were scored.

    A string is split at white space.
    """
    if not predictions:
        raise InputError("nothing to score: no predictions; give at least one")
    if len(predictions) != len(references):
        counts = f"{len(predictions)} predictions and {len(references)} lists of references"
        raise InputError(f"{counts}; give one list of references for each prediction")
    errors = length = wrong = 0
    for number, (prediction, accepted) in enumerate(zip(predictions, references, strict=True), 1):
        distance, reference_length = _closest(_split(prediction), accepted, number)
        errors += distance
        length += reference_length
        wrong += distance > 0
    if not length:
        raise InputError("nothing to score: every reference is empty; give references with tokens")
    return {"per": errors / length, "wer": wrong / len(predictions), "examples": len(predictions)}


def _closest(prediction: Sequence[str], accepted: Sequence[str], number: int) -> tuple[int, int]:
    """Distance to the closest reference, and that reference's length."""
    if not accepted or isinstance(accepted, str):
        raise InputError(f"example {number}: no list of references; give it at least one")
    best: tuple[int, int] | None = None
    for reference in map(_split, accepted):
        distance = edit_distance(prediction, reference)
        if best is None or distance < best[0]:
            best = distance, len(reference)
    assert best is not None
    return best


def _split(text: str | Sequence[str]) -> Sequence[str]:
    return text.split() if isinstance(text, str) else text
