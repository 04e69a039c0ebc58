"""`qkv eval` on pairs: error rates of tokens, or metrics of texts with confidence intervals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qkv.cli.tables import print_table
from qkv.reports.numbers import format_interval, format_number

if TYPE_CHECKING:
    from qkv.metrics import EvaluationResult
    from qkv.metrics.seq2seq import MetricResult
    from qkv.train.pair_evaluation import PairEvaluation


def report_pairs(results: Mapping[str, PairEvaluation], output: Path | None, as_json: bool) -> None:
    """Print the metrics of each dataset, and write the predictions to a TSV file."""
    from qkv.files import atomic_write_text
    from qkv.train.evaluation import summarize_pairs

    if output is not None:
        rows = [
            [example.source, prediction, *example.references]
            for result in results.values()
            for example, prediction in zip(result.examples, result.scores.predictions, strict=True)
        ]
        atomic_write_text(output, "".join("\t".join(" ".join(cell.split()) for cell in row) + "\n" for row in rows))
    if as_json:
        print(json.dumps(summarize_pairs(results), ensure_ascii=False))
        return
    for index, (name, result) in enumerate(results.items()):
        if len(results) > 1:
            print(f"{chr(10) if index else ''}{name}")
        _print_scores(result.scores, result.losses)


def _print_scores(scores: EvaluationResult, losses: dict[str, float]) -> None:
    from qkv.metrics.seq2seq import ERROR_RATES

    values, text_metrics = scores.values, [f for f in scores.metrics if f.name not in ERROR_RATES]
    print(f"examples            {scores.num_examples:>8,}")
    if "token_error_rate" in values:
        print(
            f"token error rate    {values['token_error_rate']:>8.2%}   (phoneme error rate, where tokens are phonemes)"
        )
    if "sequence_error_rate" in values:
        print(
            f"sequence error rate {values['sequence_error_rate']:>8.2%}   (word error rate, where a sequence is a word)"
        )
    if losses:
        print(f"loss, teacher-forced{losses['loss']:>8.4f}   (mean negative log-probability per token)")
        print(f"loss, free-running  {losses['loss_free_running']:>8.4f}")
    if not text_metrics:
        return
    has_intervals = any(metric.interval for metric in text_metrics)
    rows = [[f.name, format_number(f.value, f.decimals)] for f in text_metrics]
    if has_intervals:
        intervals = [
            format_interval(f.interval.low, f.interval.high, f.decimals) if f.interval else "" for f in text_metrics
        ]
        rows = [[*row, interval] for row, interval in zip(rows, intervals, strict=True)]
    print()
    print_table(["metric", "value", *(["95 % interval"] if has_intervals else [])], rows)
    print()
    for signature, names in _metrics_by_signature(text_metrics).items():
        print(f"{', '.join(names)}: {signature}")


def _metrics_by_signature(metrics: list[MetricResult]) -> dict[str, list[str]]:
    """Return the names of the metrics of each signature."""
    by_signature: dict[str, list[str]] = {}
    for metric in metrics:
        if metric.signature:
            by_signature.setdefault(metric.signature, []).append(metric.name)
    return by_signature
