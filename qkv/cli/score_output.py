"""Output of `qkv score`: tables, JSON and a file with the scores of each example."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.cli.tables import print_table
from qkv.reports.numbers import format_interval, format_number

if TYPE_CHECKING:
    from qkv.metrics.significance import Comparison, Interval


@dataclass(frozen=True)
class Resampling:
    """Settings of the bootstrap and of the paired tests; without resamples, neither is computed."""

    resamples: int
    seed: int
    level: float

    @property
    def kwargs(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class MetricScores:
    """Scores of one metric with confidence intervals and the comparison with a baseline."""

    name: str
    metric: Any  # an AnyMetric; those of labels have a table by label too
    signature: str
    stats: Any  # [examples, k]
    scores: dict[str, float]
    intervals: dict[str, Interval]
    baseline: dict[str, float] = field(default_factory=dict)
    comparisons: dict[str, Comparison] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoreResults:
    """Scores of all metrics of one call of `qkv score`."""

    metrics: list[MetricScores]
    examples: int
    resampling: Resampling
    notes: list[str]


def print_results(results: ScoreResults, per_example: Path | None, per_class: bool, as_json: bool) -> None:
    """Print all scores as tables or JSON, and write those of each example to a TSV file if one is given."""
    if per_example is not None:
        _write_per_example(per_example, results)
    (_print_json if as_json else _print_tables)(results, per_class)


def _write_per_example(path: Path, results: ScoreResults) -> None:
    from qkv.files import atomic_write_text

    columns: dict[str, list[str]] = {}
    for metric in results.metrics:
        per_example = metric.metric.per_example(metric.stats)
        for score_name in dict.fromkeys(score_name for row in per_example for score_name in row):
            title = score_name if score_name == metric.name else f"{metric.name}.{score_name}"
            decimals = metric.metric.decimals
            columns[title] = [format_number(row.get(score_name, math.nan), decimals) for row in per_example]
    lines = zip(*columns.values(), strict=True)
    atomic_write_text(path, "".join("\t".join(line) + "\n" for line in [tuple(columns), *lines]))


def _print_json(results: ScoreResults, per_class: bool) -> None:
    metrics: dict[str, Any] = {}
    for metric in results.metrics:
        scores = {score_name: _score_fields(metric, score_name) for score_name in metric.scores}
        metrics[metric.name] = {"signature": metric.signature, "scores": scores}
        if per_class and hasattr(metric.metric, "per_class"):
            metrics[metric.name]["classes"] = metric.metric.per_class(metric.stats)
    resampling = asdict(results.resampling) if results.resampling.resamples else None
    print(
        json.dumps({"examples": results.examples, "metrics": metrics, "bootstrap": resampling, "notes": results.notes})
    )


def _score_fields(metric: MetricScores, score_name: str) -> dict[str, Any]:
    fields: dict[str, float] = {"value": metric.scores[score_name]}
    if score_name in metric.intervals:
        interval = metric.intervals[score_name]
        fields |= {"ci_low": interval.low, "ci_high": interval.high}
    if metric.baseline:
        fields["baseline"] = metric.baseline.get(score_name, math.nan)
    if score_name in metric.comparisons:
        comparison = asdict(metric.comparisons[score_name])
        bounds = comparison.pop("interval")
        fields |= {**comparison, "difference_ci_low": bounds["low"], "difference_ci_high": bounds["high"]}
    # JSON has no infinity and no NaN
    return {key: value if math.isfinite(value) else None for key, value in fields.items()}


def _print_tables(results: ScoreResults, per_class: bool) -> None:
    has_baseline = any(metric.baseline for metric in results.metrics)
    header = [
        "metric",
        "score",
        "value",
        *(["interval"] if results.resampling.resamples else []),
        *(["baseline"] if has_baseline else []),
    ]
    rows = [_score_row(metric, score_name) for metric in results.metrics for score_name in metric.scores]
    print_table(header, rows, text_columns=2)
    if any(metric.comparisons for metric in results.metrics):  # in a second table, so that both fit into 80 columns
        print()
        header = ["metric", "score", "difference", "interval", "p (boot.)", "p (rand.)"]
        rows = [_comparison_row(metric, score_name) for metric in results.metrics for score_name in metric.comparisons]
        print_table(header, rows, text_columns=2)
    for metric in results.metrics if per_class else []:
        if hasattr(metric.metric, "per_class"):
            print()
            print_table([metric.name, "precision", "recall", "f1", "support"], _class_rows(metric))
    print()
    summary = f"{results.examples:,} examples"
    resampling = results.resampling
    if resampling.resamples:
        summary += f"; {resampling.level:.0%} intervals from {resampling.resamples:,} resamples, seed {resampling.seed}"
    print(summary)
    if any(metric.comparisons for metric in results.metrics):
        print("p (boot.): paired bootstrap (Koehn 2004); p (rand.): approximate randomization (Riezler & Maxwell 2005)")
    signatures = [f"{metric.name}: {metric.signature}" for metric in results.metrics if metric.signature]
    for line in [*signatures, *results.notes]:
        print(line)


def _score_row(metric: MetricScores, score_name: str) -> list[str]:
    decimals = metric.metric.decimals
    row = [metric.name, score_name, format_number(metric.scores[score_name], decimals)]
    if metric.intervals:
        interval = metric.intervals[score_name]
        row.append(format_interval(interval.low, interval.high, decimals))
    return [*row, format_number(metric.baseline.get(score_name, math.nan), decimals)] if metric.baseline else row


def _comparison_row(metric: MetricScores, score_name: str) -> list[str]:
    decimals, comparison = metric.metric.decimals, metric.comparisons[score_name]
    interval = format_interval(comparison.interval.low, comparison.interval.high, decimals, sign="+")
    p_values = (f"{p_value:.4f}" for p_value in (comparison.p_bootstrap, comparison.p_randomization))
    return [metric.name, score_name, format_number(comparison.difference, decimals, sign="+"), interval, *p_values]


def _class_rows(metric: MetricScores) -> list[list[str]]:
    return [
        [str(label), *(format_number(line[key], 4) for key in ("precision", "recall", "f1")), f"{line['support']:,.0f}"]
        for label, line in metric.metric.per_class(metric.stats).items()
    ]
