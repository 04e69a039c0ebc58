"""Error rates of token sequences, as in papers on grapheme-to-phoneme conversion, and of words and characters of texts.

Both allow several references.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from qkv.errors import InputError
from qkv.metrics.metric import Metric, Stats, check_texts, require_package
from qkv.metrics.registry import MetricEntry


def edit_distance(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Return the smallest number of insertions, deletions and substitutions from `a` to `b` (Levenshtein, 1966)."""
    first, last_a, last_b = 0, len(a), len(b)
    # a common prefix and suffix cost nothing in some best alignment, and most predictions are nearly correct
    while first < last_a and first < last_b and a[first] == b[first]:
        first += 1
    while last_a > first and last_b > first and a[last_a - 1] == b[last_b - 1]:
        last_a, last_b = last_a - 1, last_b - 1
    rest = b[first:last_b]
    row = list(range(len(rest) + 1))  # distances from the prefix of `a` read so far to each prefix of `rest`
    for prefix_length, token in enumerate(a[first:last_a], 1):
        diagonal, row[0] = row[0], prefix_length
        for column, other in enumerate(rest, 1):
            substituted = diagonal + (token != other)
            diagonal = row[column]
            row[column] = min(substituted, diagonal + 1, row[column - 1] + 1)
    return row[-1]


def error_rates(
    predictions: Sequence[str | Sequence[str]], references: Sequence[Sequence[str]]
) -> dict[str, float | int]:
    """Score each prediction against the closest of its references. Strings are split at white space.

    - "token_error_rate": the sum of the edit distances to the closest references, divided by the sum of the lengths of
      those references (phoneme error rate). Of equally close references the first counts. It may exceed 1.
    - "sequence_error_rate": the fraction of predictions that equal none of their references; papers on
      grapheme-to-phoneme conversion call it word error rate.
    - "examples": the number of predictions.
    """
    if not predictions:
        raise InputError("nothing to score: no predictions; give at least one")
    if len(predictions) != len(references):
        counts = f"{len(predictions)} predictions and {len(references)} lists of references"
        raise InputError(f"{counts}; give one list of references for each prediction")
    errors = length = num_wrong = 0
    for number, (prediction, accepted) in enumerate(zip(predictions, references, strict=True), 1):
        distance, reference_length = _closest_reference(_split_words(prediction), accepted, number)
        errors += distance
        length += reference_length
        num_wrong += distance > 0
    if not length:
        raise InputError("nothing to score: every reference is empty; give references with tokens")
    return {
        "token_error_rate": errors / length,
        "sequence_error_rate": num_wrong / len(predictions),
        "examples": len(predictions),
    }


def _closest_reference(prediction: Sequence[str], accepted: Sequence[str], number: int) -> tuple[int, int]:
    """Return the distance to the closest reference, and the length of that reference."""
    if not accepted or isinstance(accepted, str):
        raise InputError(f"example {number}: no list of references; give it at least one")
    best: tuple[int, int] | None = None
    for reference in map(_split_words, accepted):
        distance = edit_distance(prediction, reference)
        if best is None or distance < best[0]:
            best = distance, len(reference)
    assert best is not None
    return best


def _split_words(text: str | Sequence[str]) -> Sequence[str]:
    return text.split() if isinstance(text, str) else text


@dataclass(frozen=True)
class ErrorRate(Metric[str, Sequence[str]]):
    """Word or character error rate, computed by jiwer: substitutions, deletions and insertions per reference unit.

    Words are separated by spaces. Of several references the closest counts, of equally close ones the first. If all
    references are empty, the rate is the number of insertions, as in jiwer.
    """

    higher_is_better: ClassVar[bool] = False
    unit: Literal["word", "character"] = "word"
    """Unit that is compared."""
    lowercase: bool = False
    """Lowercase both sides."""

    @property
    def name(self) -> str:  # type: ignore[override]  # a class variable elsewhere; here it depends on the unit
        return "wer" if self.unit == "word" else "cer"

    def statistics(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Stats:
        check_texts(hypotheses, references)
        jiwer = require_package("jiwer", "an error rate")
        process = jiwer.process_words if self.unit == "word" else jiwer.process_characters
        normalize = str.lower if self.lowercase else str
        rows = []
        for hypothesis, accepted in zip(hypotheses, references, strict=True):
            alignments = [process([normalize(reference)], [normalize(hypothesis)]) for reference in accepted]
            edits = [
                (alignment.substitutions, alignment.deletions, alignment.insertions, alignment.hits)
                for alignment in alignments
            ]
            rows.append(min(edits, key=lambda e: sum(e[:3])))
        return np.array(rows, dtype=np.float64)

    def score(self, stats: Stats) -> dict[str, float]:
        substitutions, deletions, insertions, hits = map(float, stats)
        length = max(1.0, substitutions + deletions + hits)
        kinds = {"substitutions": substitutions, "deletions": deletions, "insertions": insertions}
        return {
            self.name: (substitutions + deletions + insertions) / length,
            **{kind: errors / length for kind, errors in kinds.items()},
        }

    def signature(self, references: Sequence[Sequence[str]]) -> str:  # noqa: ARG002
        return "lower-cased" if self.lowercase else ""


def _error_rate_entry(unit: Literal["word", "character"]) -> MetricEntry:
    return MetricEntry(
        "texts",
        lambda options, _: ErrorRate(unit, options.lowercase),
        ("lowercase",),
        higher_is_better=False,
        package="jiwer",
    )


WER, CER = _error_rate_entry("word"), _error_rate_entry("character")
